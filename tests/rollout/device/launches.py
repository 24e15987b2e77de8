"""Steps of a model runner, launched by hand, and graphs that run on the CPU as they are."""

import torch

from rl_consistency.models.graph_cache import Captured
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.device.ragged_graphs import CAPTURED_AT, RaggedGraphs
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import ScheduledChunk
from rl_consistency.rollout.sequence import RolloutSequence

PLAIN = SamplingParams(seed=3)
TRUNCATED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3)
MOST, BLOCKS = 6, 30
"""Sequences at a time, in buckets of 1, 2, 4 and 6 rows; and blocks for each."""


class Uncaptured(DecodeGraphs):
    """Calls that are run again instead of replayed."""

    def _capture(self, shape, *_):
        kept = self._prepare()
        call = self._call(shape)
        self.shapes = [*getattr(self, "shapes", []), shape]
        return Captured(call, call.run, kept)


class UncapturedRagged(RaggedGraphs):
    """The same of calls between whose graphs attention runs."""

    def _capture(self, shape, *_):
        kept = self._prepare()
        call = self._call(shape)
        call.run()  # on padding alone, as before a capture

        def run_again(paged):
            call.run_with(lambda *operands: call.attention(*operands, paged))

        return Captured(call, run_again, kept)


def uncaptured(runner):
    """Gives a runner such graphs of decode steps."""
    runner.decode_graphs = graphs = Uncaptured(*runner.parts, capacity=runner.capacity)
    return graphs


def runner_of(model, *, decode=False, ragged=0, **settings):
    """A runner of `MOST` sequences of `BLOCKS` blocks of 4; `decode`, `ragged`: with such graphs of
    decode steps, and of up to so many rows. Only padding may read the dummy block: it holds NaN."""
    sizes = {"block_size": 4, "num_blocks": BLOCKS * MOST, "max_num_seqs": MOST}
    runner = ModelRunner(model, **sizes | settings)
    if decode:
        uncaptured(runner)
    if ragged:
        runner.ragged_graphs = UncapturedRagged(*runner.parts, most=ragged)
    for cache in [*runner._cache.keys, *runner._cache.values]:
        cache[-1].fill_(torch.nan)
    return runner


def sample_of(tokens, *, index=0, sample=0, params=PLAIN, stop=(), blocks=(), slot=None):
    """A sample of prompt number `index`, with cache blocks and a slot if it runs."""
    sequence = RolloutSequence(
        prompt_index=index,
        sample_index=sample,
        prompt_id=index,
        params=params,
        stop_token_ids=frozenset(stop),
        token_ids=tokens,
    )
    sequence.block_table, sequence.slot = list(blocks), slot
    return sequence


def admitted(runner, lengths, params=PLAIN, *, blocks=BLOCKS, vocabulary=40):
    """Sequences of these lengths with `blocks` blocks each; their slots and blocks are in another
    order than their rows. `params` are those of all, or are taken in turn."""
    each, sequences = (params,) if isinstance(params, SamplingParams) else params, []
    for i, length in enumerate(lengths):
        sequence = sample_of(
            [(7 * i + 3 * n + 1) % vocabulary for n in range(length)],
            index=i,
            params=each[i % len(each)],
            blocks=range((i + 1) * blocks - 1, i * blocks - 1, -1),
            slot=len(lengths) - 1 - i,
        )
        runner.admit(sequence)
        sequences.append(sequence)
    return sequences


def sharing(runner, sizes, prompt):
    """Admitted samples of prompts of `prompt` tokens: the first of each fills the whole blocks that
    the others hold too."""
    blocks, sequences = iter(range(runner.num_blocks)), []
    for i, samples in enumerate(sizes):
        tokens = [(7 * i + 3 * n + 1) % 40 for n in range(prompt)]
        common = [next(blocks) for _ in range(prompt // 4)]
        for j in range(samples):
            own = [next(blocks) for _ in range(4)]
            place = {"blocks": common + own, "slot": len(sequences) * 5 % 6}
            sequences.append(sample_of(tokens, index=i, sample=j, **place))
            runner.admit(sequences[-1])
    # The samples of a prompt do not stand side by side.
    return sequences[::2] + sequences[1::2]


def whole(sequences):
    return [ScheduledChunk(s, 0, s.num_tokens, True) for s in sequences]


def ahead(sequences, step):
    """The next token of each, `step` of them not reported yet."""
    return [ScheduledChunk(s, s.num_tokens + step, 1, True) for s in sequences]


def decoded(runner, sequences, steps=4):
    """Prefill and `steps` decode steps, each launched before the one before is reported."""
    launched = [runner.launch(whole(sequences))]
    launched += [runner.launch(ahead(sequences, step)) for step in range(steps)]
    found = [step.wait() for step in launched]
    return [[rows[i][0] for rows in found] for i in range(len(sequences))]


def verified(runner, sequences, texts, lengths):
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


def prefilled(runner, lengths, params=PLAIN, cut=0, **prompts):
    """What prefill gives, in two calls with a `cut`, and two decode steps that read its keys; so
    often that the last run through captured calls. `prompts`: see `admitted`."""
    found = []
    for _ in range(CAPTURED_AT + 1):
        sequences = admitted(runner, lengths, params, **prompts)
        chunks, past = whole(sequences), [s for s in sequences if s.num_tokens > cut > 0]
        if past:
            assert runner.launch([ScheduledChunk(s, 0, cut, False) for s in past]).wait() == []
            chunks = [
                ScheduledChunk(s, cut, s.num_tokens - cut, True) if s in past else chunk
                for s, chunk in zip(sequences, chunks)
            ]
        steps = [runner.launch(chunks), *(runner.launch(ahead(sequences, n)) for n in (0, 1))]
        found.append([step.wait() for step in steps])
    assert all(each == found[0] for each in found)
    return found[0]
