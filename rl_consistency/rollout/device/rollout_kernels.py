"""Which kernels a policy's rollouts need, compiled before the first one needs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rl_consistency.kernels.attention.layout import SHARED_BLOCK
from rl_consistency.kernels.core.compile_ahead import use_workers
from rl_consistency.numerics.strict import current
from rl_consistency.rollout.device.decode_graphs import buckets_up_to, width_for
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.device.rollout_bounds import RolloutBounds
from rl_consistency.rollout.progress import compile_line
from rl_consistency.rollout.sequence import RolloutSequence
from rl_consistency.rollout.weights import model_digest


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What decides which kernels rollouts launch."""

    truncates: bool
    shares: bool
    width: int  # of the longest draft
    bounds: RolloutBounds
    stock: frozenset[str]

    def covers(self, other: _Kind) -> bool:
        """Whether the kernels of the other are among these."""
        mine, theirs = self.bounds, other.bounds
        return (
            (self.truncates, self.stock) == (other.truncates, other.stock)
            # Keys that are shared are compiled beside those that are not.
            and self.shares >= other.shares
            and self.width >= other.width
            and mine.tokens >= theirs.tokens
            and mine.sequences >= theirs.sequences
            and mine.longest >= theirs.longest
        )


class RolloutKernels:
    """The kernels of one runner, by what its sampling restricts, its drafts and sizes, whether its
    samples share keys, and which ops are stock.

    Those of the weights digest are among them. Nothing is compiled ahead on a CPU, nor while
    modules have hooks. Ranks of one machine share its cores, and the first of them shows the line.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Any,
        max_tokens: int,
        max_seqs: int,
        *,
        shares: bool,
        quiet: bool,
    ) -> None:
        self._runner, self._model, self._quiet = runner, model, quiet
        self._shares = shares  # whether sequences may share cache blocks
        self._bounds = RolloutBounds(
            tokens=max_tokens,
            sequences=max_seqs,
            longest=model.config.max_position_embeddings,
            batch_sizes=buckets_up_to(max_seqs),
        )
        self._compiled: list[_Kind] = []

    def compile(
        self,
        drafts: Sequence[int],
        truncates: bool,
        batch_sizes: Sequence[int] | None,
        longest: int | None,
    ) -> None:
        """Compile all kernels; arguments are those of `ModelRunner.warm_up`."""
        self._runner.check_batch_sizes(batch_sizes or ())
        sizes = self._bounds.batch_sizes if batch_sizes is None else tuple(batch_sizes)
        kind = self._kind(drafts, truncates, self._shares, self._bounds)
        bounds = replace(self._bounds, batch_sizes=sizes)
        self._compile(kind, bounds, drafts, longest, captures=True)

    def compile_for(self, sequences: Sequence[RolloutSequence]) -> None:
        """Compile the kernels that these sequences need, before the first rollout of their kind.

        A later rollout that is larger has its sizes rounded up, so that few kernels are compiled.
        """
        if not sequences:
            return
        truncates = any(s.params.restricts_support for s in sequences)
        shares = self._shares and _may_share(sequences)
        drafts = range(max(s.params.speculation for s in sequences) + 1)
        tokens, count = sum(s.num_tokens for s in sequences), len(sequences)
        blocks = sum(-(-s.max_num_tokens // self._runner.block_size) for s in sequences)
        if blocks > self._runner.num_blocks:
            # A preempted sequence is computed again, with what it has sampled.
            tokens = sum(s.max_num_tokens for s in sequences)
        tokens = max(tokens, count * width_for(max(drafts)))
        longest = max(s.max_num_tokens for s in sequences)
        kind = self._kind(drafts, truncates, shares, self._within(tokens, count, longest))
        if any(compiled.covers(kind) for compiled in self._compiled):
            return
        if self._compiled:
            sizes = (1 << (size - 1).bit_length() for size in (tokens, count, longest))
            kind = replace(kind, bounds=self._within(*sizes))
        self._compile(kind, kind.bounds, drafts, None, captures=False)

    def _within(self, tokens: int, sequences: int, longest: int) -> RolloutBounds:
        most, count = self._bounds, min(sequences, self._bounds.sequences)
        return RolloutBounds(
            tokens=min(most.tokens, tokens),
            sequences=count,
            longest=min(most.longest, longest),
            batch_sizes=buckets_up_to(count),
        )

    def _kind(
        self, drafts: Sequence[int], truncates: bool, shares: bool, bounds: RolloutBounds
    ) -> _Kind:
        return _Kind(
            truncates=truncates,
            shares=shares,
            width=width_for(max(drafts)),
            bounds=bounds,
            stock=current().stock,
        )

    def _compile(
        self,
        kind: _Kind,
        bounds: RolloutBounds,
        drafts: Sequence[int],
        longest: int | None,
        *,
        captures: bool,
    ) -> None:
        if self._runner.hooked:
            return
        ranks = local_ranks()
        if ranks > 1:  # all of them compile the same at the same time
            use_workers(max(len(os.sched_getaffinity(0)) // ranks, 1))
        with compile_line(quiet=self._quiet or os.environ.get("LOCAL_RANK", "0") != "0") as report:
            self._runner.compile_ahead(
                bounds,
                drafts=drafts,
                truncates=kind.truncates,
                shares=kind.shares,
                longest=longest,
                captures=captures,
                also=[partial(model_digest, self._model)],
                report=report,
            )
        self._compiled = [k for k in self._compiled if not kind.covers(k)] + [kind]


def local_ranks() -> int:
    """Processes of this run on this machine, as torchrun and accelerate say; 1 without them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(told), 1) if told.isdecimal() else 1


def _may_share(sequences: Sequence[RolloutSequence]) -> bool:
    """Whether two of the sequences begin alike, for as long as shared keys are read once."""
    heads = [tuple(s.token_ids[:SHARED_BLOCK]) for s in sequences if s.num_tokens > SHARED_BLOCK]
    return len(set(heads)) < len(heads)
