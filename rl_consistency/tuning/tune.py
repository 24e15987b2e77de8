"""`tune`: the launches of a policy within a budget, the most important first, and the report.

Of one launch bytes are compared first, then times, and a challenger has to win twice. All
candidates run a few rounds. Those near the fastest go on for more, beside the default. The fastest
of these takes its place only if it is faster by `MARGIN`, and again so in a second measurement of
the two alone. Then it meets what the op's rule takes for fewer rows of the bucket, and must not
lose by `MARGIN` there. Else the rule stays in force, for every number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.cases.case import Op
from rl_consistency.cases.launches import Launch, compare
from rl_consistency.kernels.core.findings import (
    MOST_ROWS,
    RULE,
    Findings,
    Winner,
    findings_of,
    of_work,
)
from rl_consistency.kernels.core.operand import require_device
from rl_consistency.kernels.matmul import audit
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning.policy_works import policy_config, policy_works
from rl_consistency.tuning.stopwatch import ColdDevice, Timer, interleaved

BUDGET = 60.0
"""Seconds that `tune` may take by default."""

ROOM = 3
"""A launch needs so many times its bytes: operands, clones that are compared, results."""

MARGIN = 0.98
"""A challenger takes at most this share of the default's time."""

SCREEN_ROUNDS = 3, 3
NEAR = 1.2
"""Candidates that take at most so many times the fastest one's time go on, `FINALISTS` at most."""
FINALISTS = 4
FINAL_SECONDS, FINAL_ROUNDS = 0.05, (7, 25)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found for one launch."""

    work: Launch
    default: str
    """The schedule that runs without a winner."""
    default_us: float
    winner: str
    winner_us: float
    withdrawn: dict[str, str] = field(default_factory=dict)
    """Candidates whose bytes differ: why."""
    known: bool = False
    """Whether the times are those of an earlier measurement; bytes were compared again."""

    @property
    def gain(self) -> float:
        """The default's time over the winner's; 1 where the default stays."""
        return self.default_us / self.winner_us


Tell = Callable[[Outcome | None, str], object]
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
        why = "the CPU has one schedule for each op. Move the model to a GPU."
        raise ValueError(f"nothing to tune on {device}: {why}")
    require_device("tune", torch.empty(0, device=device))


def tune_device(works: Sequence[Launch], device: torch.device, **options: Any) -> TuningReport:
    """Tune launches on a GPU and keep the winners among those of the device; for the options see
    `tune_works`."""
    started = time.perf_counter()
    options["clock"] = lambda: time.perf_counter() - started
    with numeric_settings(), torch.no_grad():
        report = tune_works(works, ColdDevice(device), findings_of(device), **options)
    torch.cuda.empty_cache()  # the process goes on with other work
    return report


def tune_works(
    works: Sequence[Launch],
    bench: ColdDevice,
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
    tell = tell or (lambda outcome, name: None)
    for work in works:
        needed = ROOM * work.moved
        if clock() >= budget:
            left_out[work.entry] = f"the budget of {budget:g} s was spent"
        elif needed > bench.free_bytes():
            left_out[work.entry] = f"it needs {needed / 2**30:.1f} GiB of free memory"
        else:
            tell(None, work.key)
            try:
                outcomes.append(measured(work, bench, store, again=again))
                tell(outcomes[-1], work.key)
            except torch.OutOfMemoryError:
                left_out[work.entry] = "the GPU's memory ran out"
    path = str(store.path or "")
    return TuningReport(outcomes=outcomes, left_out=left_out, path=path, seconds=clock())


def race(timers: Mapping[str, Timer], default: str) -> Winner:
    """The winner of some timers by median seconds; `default` unless a challenger beats it twice."""
    screened = _medians(timers, timers, 0.0, SCREEN_ROUNDS)
    limit = NEAR * min(screened.values())
    near = [name for name in sorted(screened, key=screened.__getitem__) if screened[name] <= limit]
    times = _medians(timers, [default, *near[:FINALISTS]], FINAL_SECONDS, FINAL_ROUNDS)
    best = fastest(times)
    if best != default and times[best] <= MARGIN * times[default]:
        times = _medians(timers, [default, best], FINAL_SECONDS, FINAL_ROUNDS)
    if times[best] > MARGIN * times[default]:
        best = default
    return Winner(best, 1e6 * times[best], 1e6 * times[default])


def fastest(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=seconds.__getitem__)


def measured(work: Launch, bench: ColdDevice, store: Findings, *, again: bool = False) -> Outcome:
    """Tune one launch: compare, withdraw, time, and keep the winner in the store.

    A winner that the store has already is compared and not timed, unless `again`.
    """
    kept = None if again else store.finding(work.entry)
    if kept is not None and kept.us and kept.schedule in (RULE, *work.candidates):
        found = replace(kept, schedule=work.default) if kept.schedule == RULE else kept
        if found.schedule in _usable(work, bench, store, [found.schedule])[1]:
            return _outcome(work, store, found, known=True)
        # It has been withdrawn just now.
    found = _raced(work, bench, store, work.default)
    if found.schedule != work.default and not _holds_for_fewer(work, found.schedule, bench, store):
        found = Winner(work.default, found.default_us, found.default_us)
    # The rule decides by the exact rows where it did not lose.
    kept = replace(found, schedule=RULE) if found.schedule == work.default else found
    store.keep(work.entry, kept)
    return _outcome(work, store, found)


def _usable(
    work: Launch, bench: ColdDevice, store: Findings, only: Iterable[str] = ()
) -> tuple[tuple[Tensor, ...], dict[str, Op]]:
    """Operands, and the candidates, or `only` some and the default, that have the default's bytes;
    those of other bytes are withdrawn."""
    operands, wanted = work.operands(), {work.default, *only} if only else {*work.candidates}
    calls = [call for name, call in work.candidates.items() if name in wanted]
    bench.prepare([partial(call, *operands) for call in calls])
    found = compare(work, operands, wanted)
    used = store.winner(work.entry)
    for name, reason in found.withdrawn.items():
        store.withdraw(of_work(work.entry, name), reason)
        if used is not None and used.schedule == name:
            # What was computed with it, an engine's graphs and keys, has to go.
            audit.withdraw(of_work(work.entry, name))
    # What was withdrawn earlier stays so, whatever it gave today.
    return operands, {
        name: call
        for name, call in found.equal.items()
        if name == work.default or not store.is_withdrawn(work.entry, name)
    }


def _raced(
    work: Launch, bench: ColdDevice, store: Findings, default: str, only: Iterable[str] = ()
) -> Winner:
    """The winner of those that are usable; none where `default` is not."""
    operands, usable = _usable(work, bench, store, only)
    if default not in usable:
        return Winner("")
    # Timed calls may write into their operands, so all of them come after the comparisons.
    copies = bench.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    calls = {name: [partial(call, *own) for own in sets] for name, call in usable.items()}
    return race(bench.timers(calls), default)


def _holds_for_fewer(work: Launch, winner: str, bench: ColdDevice, store: Findings) -> bool:
    """Whether the rule's own schedule for fewer rows of the bucket does not beat a winner there."""
    if work.fewer is None or work.fewer.default == winner:
        return True
    return _raced(work.fewer, bench, store, winner, [winner]).schedule == winner


def _outcome(work: Launch, store: Findings, found: Winner, *, known: bool = False) -> Outcome:
    reasons = {name: store.withdrawn.get(of_work(work.entry, name)) for name in work.candidates}
    withdrawn = {name: why for name, why in reasons.items() if why is not None}
    of: Any = {"default": work.default, "default_us": found.default_us, "winner_us": found.us}
    return Outcome(work=work, **of, winner=found.schedule, withdrawn=withdrawn, known=known)


def _medians(
    timers: Mapping[str, Timer], names: Iterable[str], seconds: float, rounds: tuple[int, int]
) -> dict[str, float]:
    chosen, (least, most) = {name: timers[name] for name in names}, rounds
    samples = interleaved(chosen, seconds=seconds, least=least, most=most)
    return {name: median(values) for name, values in samples.items()}
