"""`tune`: the launches of a policy within a budget, the most important first, and the report."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from rl_consistency.cases.launches import Launch
from rl_consistency.kernels.core.findings import MOST_ROWS, Findings, findings_of
from rl_consistency.kernels.core.operand import require_device
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning.measure import SCATTER, Outcome, measured
from rl_consistency.tuning.policy_works import policy_config, policy_works
from rl_consistency.tuning.stopwatch import Bench, ColdDevice

BUDGET = 60.0
"""Seconds that `tune` may take by default."""

ROOM = 3
"""A launch needs so many times its bytes: operands, clones that are compared, results."""

Tell = Callable[[Outcome | None, str], None]
"""Called with each outcome, and before it with None and the name of the launch."""


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """What `tune` found."""

    outcomes: list[Outcome] = field(default_factory=list)
    """One per launch, in the order they were tuned in."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Launches that were not tuned, and why; what the op's rule takes runs there."""
    path: str = ""
    """The file of the winners."""
    seconds: float = 0.0

    @property
    def withdrawn(self) -> dict[str, str]:
        """`work: schedule` of each candidate whose bytes differ, and how; empty if all is well."""
        return {
            f"{outcome.work.entry}: {name}": reason
            for outcome in self.outcomes
            for name, reason in outcome.withdrawn.items()
        }

    @property
    def passed(self) -> bool:
        """Whether every candidate gave the reference's bytes."""
        return not self.withdrawn

    @property
    def scatter(self) -> float:
        """Half of a typical launch's samples lie within this share of their median."""
        found = [outcome.scatter for outcome in self.outcomes if not outcome.known]
        return median(found) if found else 0.0


def tune(
    model: nn.Module,
    *,
    budget: float = BUDGET,
    rows: int = MOST_ROWS,
    again: bool = False,
    tell: Tell | None = None,
) -> TuningReport:
    """Measure the schedules of the policy's products on its GPU, and keep the fastest ones.

    Winners are in force from the next call on, in this process and in later ones on this device.
    They change no bit, so it may be called at any time; CUDA graphs that were captured before keep
    their schedules.

    Args:
        model: a Hugging Face causal LM on a GPU, patched or not, under any wrapper.
        budget: seconds; the most important works come first, and the report names those left out.
        rows: tokens of a training batch, the most rows of any product.
        again: measure also what is known already.
        tell: called with (None, name) before each work, and with (outcome, name) after it.

    Raises:
        ValueError: a model on a CPU, which has one schedule for each op; a budget or rows that are
            not positive; a configuration that no canonical order covers.
        TypeError: no Hugging Face model, or a dtype without a canonical order.
    """
    config, dtype = policy_config(model)
    device = next(model.parameters()).device
    require_tunable(device)
    if not budget > 0:
        raise ValueError(f"budget={budget}: give a positive number of seconds.")
    works = policy_works(config, dtype, device, rows)
    return tune_device(works, device, budget=budget, again=again, tell=tell)


def require_tunable(device: torch.device) -> None:
    """ValueError unless the device is a GPU with schedules to choose from, and the current one."""
    if device.type != "cuda":
        raise ValueError(
            f"nothing to tune on {device}: the CPU has one schedule for each op. Move the model to "
            "a GPU."
        )
    require_device("tune", torch.empty(0, device=device))


def tune_device(works: Sequence[Launch], device: torch.device, **options: Any) -> TuningReport:
    """Tune launches on a GPU and keep the winners among those of the device; for the options see
    `tune_works`."""
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    with numeric_settings(), torch.no_grad():
        bench, store = ColdDevice(device), findings_of(device)
        report = tune_works(works, bench, store, clock=clock, **options)
    torch.cuda.empty_cache()  # the process goes on with other work
    return report


def tune_works(
    works: Sequence[Launch],
    bench: Bench,
    store: Findings,
    *,
    clock: Callable[[], float],
    budget: float = BUDGET,
    again: bool = False,
    tell: Tell | None = None,
) -> TuningReport:
    """Tune launches one by one until the budget is spent; `clock` gives seconds since the start."""
    outcomes: list[Outcome] = []
    left_out: dict[str, str] = {}
    for work in works:
        needed = ROOM * work.moved
        if clock() >= budget:
            left_out[work.entry] = f"the budget of {budget:g} s was spent"
            continue
        if needed > bench.free_bytes():
            left_out[work.entry] = f"it needs {needed / 2**30:.1f} GiB of free memory"
            continue
        if tell is not None:
            tell(None, work.key)
        try:
            outcomes.append(measured(work, bench, store, again=again))
        except torch.OutOfMemoryError:
            left_out[work.entry] = "the GPU's memory ran out"
            continue
        if tell is not None:
            tell(outcomes[-1], work.key)
    report = TuningReport(
        outcomes=outcomes, left_out=left_out, path=str(store.path or ""), seconds=clock()
    )
    if report.scatter > SCATTER:
        warnings.warn(
            f"timings scatter: half of the samples lie within {report.scatter:.0%} of their "
            f"median, where {SCATTER:.0%} is usual. Is the GPU shared with other work? Winners are "
            "of medians and had to win twice; tune again on an idle GPU for better ones.",
            stacklevel=2,
        )
    return report
