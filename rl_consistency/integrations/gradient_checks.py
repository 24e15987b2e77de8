"""Gradient checks of what a trainer's own loss asks for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback

from rl_consistency.models.packing import PaddedBatch
from rl_consistency.models.scoring.token_logprobs import LabelLogprobs, TokenLogprobs
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.gradients import REGROUPINGS, GradientReport, Regrouping, check_gradients

SEQUENCES = 4
"""How many sequences of a micro-batch a check takes."""


@dataclass(eq=False)
class _MicroBatch:
    """What a trainer scored in one call, and what its loss asked of the scores."""

    input_ids: Tensor  # [B, L]
    batch: PaddedBatch
    mask: Tensor  # [B, L-1] bool, where a label was scored
    cotangents: dict[str, Tensor] = field(default_factory=dict)  # of scores, [B, L-1]

    def keep(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # as DistributedDataParallel says that there is none
            self.cotangents[name] = gradient.detach().clone()

    def has_gradient(self) -> bool:
        return any(bool(part[self.mask].any()) for part in self.cotangents.values())

    def sequences(self, columns: Tensor) -> list[Tensor]:
        """[B, L-1] or [B, L] -> each sequence's tokens, on the CPU."""
        whole = columns.new_zeros(self.input_ids.shape)
        whole[:, -columns.shape[1] :] = columns
        lens = list(self.batch.packed.layout.query_lens)
        return list(whole[self.batch.mask].cpu().split(lens))


class GradientChecks(TrainerCallback):
    """Keeps dL/dlogprobs and dL/dentropy of a micro-batch, and after the optimizer's step computes
    the gradients that follow from them under other groupings: their bytes must be equal.

    The micro-batch is the first of the step whose loss has a gradient. Each check draws `SEQUENCES`
    of it, those with a gradient before others. It runs between two steps, with the weights that the
    first of them has made, and goes on with the regroupings that the last one had no time for.

    `sampling` is what `LabelAnswer` was given, `every` and `seconds` are `attach`'s.
    """

    def __init__(
        self, trainer: Any, policy: nn.Module, sampling: Any, *, every: int, seconds: float | None
    ) -> None:
        self._trainer, self._policy, self._sampling = trainer, policy, sampling
        self._every, self._seconds = every, seconds or 0.0
        self._turn, self._longest = deque(REGROUPINGS), 0.0
        self._seen: list[_MicroBatch] = []
        self._since_log, self._total = Counter[str](), Counter[str]()
        self.last: GradientReport | None = None
        """Report of this process's last check; None before the first."""

    def observe(self, input_ids: Tensor, batch: PaddedBatch, scores: LabelLogprobs) -> None:
        """Take in a micro-batch; see `LabelAnswer`."""
        if self._trainer.state.global_step % self._every:
            return
        seen = _MicroBatch(input_ids, batch, scores.mask)
        self._seen.append(seen)
        for name in ("logprobs", "entropy"):
            getattr(scores, name).register_hook(partial(seen.keep, name))

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._total.clear()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._seen = []  # of a step that has failed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.global_step - 1) % self._every:
            return
        started = perf_counter()
        with whole_weights(self._policy):
            fault, report = self._check(started)
        self._seen = []
        mine = [(fault, _counts(report), perf_counter() - started)]
        everyone = gather_object(mine) if self._trainer.accelerator.num_processes > 1 else mine
        faults = [f"process {rank}: {f}" for rank, (f, *_) in enumerate(everyone) if f]
        for _, counts, seconds in everyone:
            self._since_log.update(counts)
            self._total.update(counts)
            self._longest = max(self._longest, seconds)
        if faults:
            raise ConsistencyError(
                f"step {state.global_step}, {faults[0]}. Run `rl-consistency verify` to see "
                "which op differs.",
                metrics=self.take(),
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._total["without_gradient"] and not self._total["checks"]:
            raise ConsistencyError(
                "no gradient was checked: in each step that was due for a check dL/dlogprobs was "
                "zero at every token. Check that rewards differ within a group, or leave "
                "check_gradients_every out."
            )

    def take(self) -> dict[str, float]:
        """Figures since the last call, over all processes."""
        if not self._since_log:
            return {}
        found, seconds = self._since_log, self._longest
        self._since_log, self._longest = Counter(), 0.0
        figures = {f"consistency/gradient_check/{name}": count for name, count in found.items()}
        return {**figures, "time/gradient_check_seconds": seconds}

    def _check(self, started: float) -> tuple[str | None, GradientReport | None]:
        """What is wrong, and what was compared."""
        if not self._seen:
            return "no micro-batch of the step was scored by the patched model", None
        if not any(seen.cotangents for seen in self._seen):
            return "the loss does not depend on what the patched model has scored", None
        seen = next((seen for seen in self._seen if seen.has_gradient()), None)
        if seen is None:
            return None, None
        masks, ids = seen.sequences(seen.mask), seen.sequences(seen.input_ids)
        asked = {
            name: [part[mask] for part, mask in zip(seen.sequences(columns), masks, strict=True)]
            for name, columns in sorted(seen.cotangents.items())
        }
        scored = [index for index, mask in enumerate(masks) if bool(mask.any())]
        drawn = Random(self._trainer.state.global_step).sample(scored, len(scored))
        drawn.sort(key=lambda index: not any(bool(parts[index].any()) for parts in asked.values()))
        chosen = sorted(drawn[:SEQUENCES])

        def loss(found: TokenLogprobs, group: Sequence[int]) -> Tensor:
            """A scalar whose gradient is the one that was kept."""
            total = found.logprobs.new_zeros(())
            for name, parts in asked.items():
                scores: Tensor = getattr(found, name)
                kept = torch.cat([parts[chosen[i]] for i in group])
                total = total + (scores * kept.to(scores)).sum()
            return total

        self.last = check_gradients(
            self._policy,
            [ids[index].tolist() for index in chosen],
            loss_mask=[masks[index].tolist() for index in chosen],
            loss=loss,
            sampling=self._sampling,
            regroupings=self._until(started + self._seconds),
        )
        return None if self.last.without_gradient else self.last.failure(), self.last

    def _until(self, end: float) -> Iterator[Regrouping]:
        for _ in REGROUPINGS:
            yield self._turn[0]
            self._turn.rotate(-1)
            if perf_counter() >= end:
                return


def _counts(report: GradientReport | None) -> dict[str, int]:
    """What one process adds to the figures."""
    found = GradientReport((), 0, 0) if report is None or report.without_gradient else report
    return {
        "checks": int(found is report),
        "without_gradient": int(found is not report),
        "regroupings": len(found.results),
        "elements": found.elements * len(found.results),
        "mismatched_elements": found.mismatched_elements,
    }
