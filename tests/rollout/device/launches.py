"""Steps of a model runner, launched by hand, and graphs that run on the CPU as they are."""

from __future__ import annotations

from typing import Any

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.models.graph_cache import Captured
from rl_consistency.rollout.device.decode_graphs import DecodeCall, DecodeGraphs, Shape
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.device.ragged_graphs import PaddedCall, PaddedShape, RaggedGraphs
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import ScheduledChunk
from rl_consistency.rollout.sequence import RolloutSequence


class Uncaptured(DecodeGraphs):
    """Calls that are run again instead of replayed."""

    shapes: list[Shape]

    def _capture(self, shape: Shape, *_: Any) -> Captured[DecodeCall]:
        kept = self._prepare()
        call = self._call(shape)
        self.shapes = [*getattr(self, "shapes", []), shape]
        return Captured(call, call.run, kept)


class UncapturedRagged(RaggedGraphs):
    """The same of calls between whose graphs attention runs."""

    def _capture(self, shape: PaddedShape, *_: Any) -> Captured[PaddedCall]:
        kept = self._prepare()
        call = self._call(shape)
        call.run()  # on padding alone, as before a capture

        def run_again(paged: PagedAttention) -> None:
            call.run_with(lambda *operands: call.attention(*operands, paged))

        return Captured(call, run_again, kept)


def uncaptured(runner: ModelRunner) -> Uncaptured:
    """Gives a runner such graphs of decode steps."""
    runner.decode_graphs = graphs = Uncaptured(*runner.parts, capacity=runner.capacity)
    return graphs


def admitted(
    runner: ModelRunner, lengths: list[int], params: SamplingParams, *, blocks: int, vocabulary: int
) -> list[RolloutSequence]:
    """Sequences of these lengths with `blocks` blocks each; their slots and blocks are in another
    order than their rows."""
    sequences = []
    for i, length in enumerate(lengths):
        sequence = RolloutSequence(
            prompt_index=i,
            sample_index=0,
            prompt_id=i,
            params=params,
            stop_token_ids=frozenset(),
            token_ids=[(7 * i + 3 * n + 1) % vocabulary for n in range(length)],
        )
        sequence.block_table = list(range((i + 1) * blocks - 1, i * blocks - 1, -1))
        sequence.slot = len(lengths) - 1 - i
        runner.admit(sequence)
        sequences.append(sequence)
    return sequences


def whole(sequences: list[RolloutSequence]) -> list[ScheduledChunk]:
    return [ScheduledChunk(s, 0, s.num_tokens, True) for s in sequences]


def ahead(sequences: list[RolloutSequence], step: int) -> list[ScheduledChunk]:
    """The next token of each, `step` of them not reported yet."""
    return [ScheduledChunk(s, s.num_tokens + step, 1, True) for s in sequences]


def decoded(runner: ModelRunner, sequences: list[RolloutSequence], steps: int = 4) -> list[Any]:
    """Prefill and `steps` decode steps, each launched before the one before is reported."""
    launched = [runner.launch(whole(sequences))]
    launched += [runner.launch(ahead(sequences, step)) for step in range(steps)]
    found = [step.wait() for step in launched]
    return [[rows[i][0] for rows in found] for i in range(len(sequences))]


def verified(
    runner: ModelRunner, sequences: list[RolloutSequence], texts: list[Any], lengths: list[int]
) -> list[Any]:
    """One step that verifies the first tokens of known texts."""
    runner.launch(whole(sequences)).wait()
    chunks = []
    for sequence, text, length in zip(sequences, texts, lengths):
        tokens = [token for token, _ in text]
        sequence.token_ids.append(tokens[0])
        draft = tuple(tokens[1 : 1 + length])
        start = sequence.num_tokens - 1
        chunks.append(ScheduledChunk(sequence, start, 1 + length, True, draft))
    return runner.launch(chunks).wait()
