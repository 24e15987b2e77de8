"""Which kernels a policy's rollouts need, compiled before the first one needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rl_consistency.numerics.strict import current
from rl_consistency.rollout.device.decode_graphs import buckets_up_to
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.device.rollout_bounds import RolloutBounds
from rl_consistency.rollout.progress import compile_line
from rl_consistency.rollout.sequence import RolloutSequence
from rl_consistency.rollout.weights import model_digest


class RolloutKernels:
    """The kernels of one runner, by what its sampling restricts, whether its samples
    share keys, and which ops are stock.

    Those of the weights digest are among them. Nothing is compiled ahead on a CPU.
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
        self._compiled: set[tuple[bool, bool, frozenset[str]]] = set()

    def compile(
        self,
        drafts: Sequence[int],
        truncates: bool,
        batch_sizes: Sequence[int] | None,
        longest: int | None,
    ) -> None:
        """All kernels; arguments are those of `ModelRunner.warm_up`."""
        self._runner.check_batch_sizes(batch_sizes or ())
        sizes = self._bounds.batch_sizes if batch_sizes is None else tuple(batch_sizes)
        bounds = replace(self._bounds, batch_sizes=sizes)
        self._compile(bounds, drafts, truncates, self._shares, longest)

    def compile_for(self, sequences: Sequence[RolloutSequence]) -> None:
        """Before the first rollout of a kind: those that sequences of these sizes need."""
        truncates = any(s.params.restricts_support for s in sequences)
        shares = self._shares and any(s.params.n > 1 for s in sequences)
        if not sequences or (truncates, shares, current().stock) in self._compiled:
            return
        most, count = self._bounds, min(len(sequences), self._bounds.sequences)
        bounds = RolloutBounds(
            tokens=min(most.tokens, sum(s.num_tokens for s in sequences)),
            sequences=count,
            longest=min(most.longest, max(s.max_num_tokens for s in sequences)),
            batch_sizes=buckets_up_to(count),
        )
        drafts = range(max(s.params.speculation for s in sequences) + 1)
        self._compile(bounds, drafts, truncates, shares, None)

    def _compile(
        self,
        bounds: RolloutBounds,
        drafts: Sequence[int],
        truncates: bool,
        shares: bool,
        longest: int | None,
    ) -> None:
        with compile_line(quiet=self._quiet) as report:
            self._runner.compile_ahead(
                bounds,
                drafts=drafts,
                truncates=truncates,
                shares=shares,
                longest=longest,
                also=[partial(model_digest, self._model)],
                report=report,
            )
        # Keys that are shared are compiled beside those that are not.
        self._compiled |= {(truncates, kind, current().stock) for kind in {shares, False}}
