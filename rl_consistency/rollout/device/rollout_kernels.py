"""Which kernels a policy's rollouts need, compiled before the first one needs them.

Schedules are picked by sizes, so calls of other sizes run other kernels. A fixed list of sizes
stands for all: it meets nearly every kernel of a call within the bounds, and one that it misses
compiles when a call needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rl_consistency.kernels.attention.layout import SHARED_BLOCK
from rl_consistency.kernels.core.compile_ahead import compile_ahead, use_workers
from rl_consistency.numerics.strict import current
from rl_consistency.rollout.device import ragged_graphs
from rl_consistency.rollout.device.calls import RaggedShape
from rl_consistency.rollout.device.decode_graphs import (
    DecodeGraphs,
    Shape,
    buckets_up_to,
    width_for,
)
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.progress import compile_line
from rl_consistency.rollout.sampling_params import SamplingParams, Truncation
from rl_consistency.rollout.sequence import RolloutSequence
from rl_consistency.rollout.weights import model_digest

GROWTH = 1.19
"""Each multiple of 16 among the numbers of rows is at most so many times the one before, or the
next."""

CHUNKS = (1, 2, 4, 8, 16, 32, 80)
"""New tokens of a sequence behind a past: what the prefix cache leaves, drafts without graphs, and
pieces of long prompts."""

SHORTEST_PAST = 48
"""Keys of the shortest past that is tried: those of one block are all alike."""


@dataclass(frozen=True, kw_only=True)
class RolloutBounds:
    """The largest sizes of a rollout's calls, and what else decides which kernels it launches."""

    tokens: int  # of one step
    sequences: int  # that run at a time
    longest: int  # tokens of one sequence
    batch_sizes: tuple[int, ...]  # numbers of sequences that decode together
    draft: int = 0  # tokens of the longest draft
    truncates: Truncation = Truncation.NONE  # the most that a row asks for
    shares: bool = False  # whether sequences may share keys
    stock: frozenset[str] = frozenset()  # ops on their stock path

    def within(self, tokens: int, sequences: int, longest: int) -> RolloutBounds:
        """These bounds with smaller sizes, where these are smaller."""
        count = min(sequences, self.sequences)
        return replace(
            self,
            tokens=min(tokens, self.tokens),
            sequences=count,
            longest=min(longest, self.longest),
            batch_sizes=buckets_up_to(count),
        )

    def covers(self, other: RolloutBounds) -> bool:
        """Whether the kernels of the other are among these."""
        sizes, others = (
            # Keys that are shared are compiled beside those that are not.
            (b.shares, width_for(b.draft), b.tokens, b.sequences, b.longest)
            for b in (self, other)
        )
        alike = (self.truncates, self.stock) == (other.truncates, other.stock)
        return alike and all(a >= b for a, b in zip(sizes, others, strict=True))


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to `most`: powers of two and multiples of 16, and numbers beside them,
    because Triton compiles other kernels for multiples of 16."""
    wanted, rows = {1, 2, 4, 8}, 16
    while rows <= most:
        wanted |= {rows, rows + 1}
        grown = max(rows + 16, int(rows * GROWTH) // 16 * 16)
        # A table may hold an entry for a power of two alone.
        rows = min(grown, 1 << rows.bit_length())
    return sorted({rows for rows in wanted if rows < most} | {most})


def continued_shapes(bounds: RolloutBounds) -> Iterator[RaggedShape]:
    """Calls of chunks that continue a past, for what attention runs there."""
    for queries in CHUNKS:
        most, longest = min(bounds.sequences, bounds.tokens // queries), bounds.longest - queries
        if most < 1 or longest < 1:
            break
        for sequences in _up_to(most, 1, factor=2):
            for past in _up_to(longest, SHORTEST_PAST, factor=4):
                yield RaggedShape(sequences=sequences, queries=queries, past=past)


def prompt_shapes(bounds: RolloutBounds) -> Iterator[RaggedShape]:
    """Calls of new prompts, for all that depends on the number of rows."""
    for rows in row_counts(bounds.tokens):
        sequences = -(-rows // bounds.longest)
        if sequences <= bounds.sequences:
            queries = rows // sequences
            sampled = min(rows, bounds.sequences * (1 + bounds.draft))
            yield RaggedShape(sequences=sequences, queries=queries, sampled=sampled)


def _up_to(most: int, first: int, *, factor: int) -> list[int]:
    """Numbers from `first` on, each larger by a factor, and at the end `most`."""
    found, number = [], first
    while number < most:
        found.append(number)
        number *= factor
    return [*found, most]


class RolloutKernels:
    """The kernels of one runner, and of the weights digest.

    Nothing is compiled ahead on a CPU, nor while modules have hooks, which would see values that
    mean nothing. Ranks of one machine share its cores, and the first of them shows the line.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Any,
        max_tokens: int,
        max_seqs: int,
        *,
        shares: bool,  # whether sequences may share cache blocks
        quiet: bool,
    ) -> None:
        self._runner, self._model, self._quiet = runner, model, quiet
        self._most = RolloutBounds(
            tokens=max_tokens,
            sequences=max_seqs,
            longest=model.config.max_position_embeddings,
            batch_sizes=buckets_up_to(max_seqs),
            shares=shares,
        )
        self._compiled: list[RolloutBounds] = []

    def bounds(
        self, sampling: SamplingParams, batch_sizes: Sequence[int] | None, longest: int | None
    ) -> RolloutBounds:
        """Those of all rollouts with `sampling`; arguments are those of `RolloutEngine.warm_up`."""
        most = self._most
        sizes = most.batch_sizes if batch_sizes is None else tuple(batch_sizes)
        if wrong := [rows for rows in sizes if not 1 <= rows <= most.sequences]:
            raise ValueError(f"batch sizes must be 1 to max_num_seqs={most.sequences}, got {wrong}")
        return replace(
            most,
            batch_sizes=sizes,
            longest=min(longest or most.longest, most.longest),
            draft=sampling.speculation,
            truncates=sampling.truncation,
            stock=current().stock,
        )

    def compile(self, bounds: RolloutBounds) -> int:
        """Compile all kernels within the bounds; returns how many this process lacked."""
        if self._runner.hooked:
            return 0
        self._compiled.append(bounds)
        return self._compile(bounds) if self._runner.device.type == "cuda" else 0

    def compile_for(self, sequences: Sequence[RolloutSequence]) -> None:
        """Compile what these sequences need, before the first rollout of their kind, and what
        prompts of up to `AHEAD` rows do; the sizes of a later, larger one are rounded up, so that
        few kernels are compiled."""
        if not sequences:
            return
        draft = max(s.params.speculation for s in sequences)
        tokens, count = sum(s.num_tokens for s in sequences), len(sequences)
        blocks = sum(-(-s.max_num_tokens // self._runner.block_size) for s in sequences)
        if blocks > self._runner.num_blocks:
            # A preempted sequence is computed again, with what it has sampled.
            tokens = sum(s.max_num_tokens for s in sequences)
        ahead = ragged_graphs.AHEAD[-1]
        sizes = (
            max(tokens, count * width_for(draft), ahead),
            count,
            max(ahead, *(s.max_num_tokens for s in sequences)),
        )
        most = replace(
            self._most,
            draft=draft,
            truncates=max(s.params.truncation for s in sequences),
            shares=self._most.shares and _may_share(sequences),
            stock=current().stock,
        )
        needed = most.within(*sizes)
        if any(compiled.covers(needed) for compiled in self._compiled):
            return
        if self._compiled:
            needed = most.within(*(1 << (n - 1).bit_length() for n in sizes))
        self.compile(needed)
        self._capture_prompts(needed)

    @torch.no_grad()
    def capture(self, bounds: RolloutBounds) -> None:
        """Capture the decode steps within the bounds, if graphs are used; where sequences may share
        keys, those of such sequences, which serve others too. And some calls of prompts."""
        if (graphs := self._runner.decode_graphs) is not None:
            # The largest first: the others fit in the memory it leaves.
            for shape in reversed(_decode_shapes(graphs, bounds, bounds.shares)):
                graphs.captured(shape)
        self._capture_prompts(bounds)

    def _capture_prompts(self, bounds: RolloutBounds) -> None:
        graphs = self._runner.ragged_graphs
        if graphs is not None and not bounds.stock and not self._runner.hooked:
            graphs.capture_ahead(bounds.tokens, bounds.sequences, truncates=bounds.truncates)

    def _compile(self, bounds: RolloutBounds) -> int:
        ranks = local_ranks()
        if ranks > 1:  # all of them compile the same at the same time
            use_workers(max(len(os.sched_getaffinity(0)) // ranks, 1))
        quiet = self._quiet or os.environ.get("LOCAL_RANK", "0") != "0"
        with torch.no_grad(), compile_line(quiet=quiet) as report:
            calls = [*self._calls(bounds), partial(model_digest, self._model)]
            return compile_ahead(calls, report)

    def _calls(self, bounds: RolloutBounds) -> Iterator[Callable[[], object]]:
        """The list. Of the device state they write the dummy slot alone, and no sequence's key."""
        runner, truncates = self._runner, bounds.truncates
        graphs, padded = runner.decode_graphs, runner.ragged_graphs
        runner.prepare()  # it lasts, so it must hold values
        bounds = replace(bounds, longest=min(bounds.longest, runner.capacity))
        # Attention first: it takes the compiler the longest.
        for shape in continued_shapes(bounds):
            yield partial(runner.attend_padding, shape)
        for shape in prompt_shapes(bounds if graphs is None else replace(bounds, draft=0)):
            yield partial(runner.run_padding, shape, truncates)
        if graphs is not None:
            shared = _decode_shapes(graphs, bounds, bounds.shares)
            for shape in dict.fromkeys([*_decode_shapes(graphs, bounds, False), *shared]):
                yield partial(graphs.run_padding, shape)
        if padded is not None:
            for rows in ragged_graphs.buckets_up_to(bounds.tokens):
                if shape := padded.shape_for(rows, 1, truncates=truncates):
                    yield partial(padded.run_padding, shape)


def _decode_shapes(graphs: DecodeGraphs, bounds: RolloutBounds, shared: bool) -> list[Shape]:
    """Of all numbers of sequences that decode together, and all widths of their drafts."""
    widths = {width_for(draft) for draft in range(bounds.draft + 1)}
    sizes = sorted({(rows, width) for rows in bounds.batch_sizes for width in widths})
    kind = {"truncates": bounds.truncates, "longest": bounds.longest}
    kind["shared"] = shared and graphs.share_keys
    return [graphs.shape_for(rows, width, **kind) for rows, width in sizes]


def local_ranks() -> int:
    """Processes of this run on this machine, as torchrun and accelerate say; 1 without them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(told), 1) if told.isdecimal() else 1


def _may_share(sequences: Sequence[RolloutSequence]) -> bool:
    """Whether two of the sequences begin alike, for as long as shared keys are read once."""
    heads = [tuple(s.token_ids[:SHARED_BLOCK]) for s in sequences if s.num_tokens > SHARED_BLOCK]
    return len(set(heads)) < len(heads)
