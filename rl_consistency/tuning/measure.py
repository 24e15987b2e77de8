"""The measurement of one launch: bytes first, then times; a challenger has to win twice.

All candidates run a few rounds. Those near the fastest go on for more, beside the default. The
fastest of these takes its place only if it is faster by `MARGIN`, and again so in a second
measurement of the two alone. Then it meets what the op's rule takes for fewer rows of the bucket,
and must not lose by `MARGIN` there. Else the rule stays in force, for every number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, quantiles

from torch import Tensor

from rl_consistency.cases.case import Op
from rl_consistency.cases.launches import Launch, compare
from rl_consistency.kernels.core.findings import RULE, Findings, Winner, of_work
from rl_consistency.kernels.matmul import audit
from rl_consistency.tuning.stopwatch import Bench, Timer, interleaved

MARGIN = 0.98
"""A challenger takes at most this share of the default's time."""

SCREEN_ROUNDS = 3
NEAR = 1.2
"""Candidates that take at most so many times the fastest one's time go on, `FINALISTS` at most."""
FINALISTS = 4
FINAL_SECONDS, FINAL_ROUNDS = 0.05, (7, 25)

SCATTER = 0.1
"""Half of a call's samples lie within this share of the median on a GPU without other work."""


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
    scatter: float = 0.0
    """Half of the samples lie within this share of the median."""
    known: bool = False
    """Whether the times are those of an earlier measurement; bytes were compared again."""

    @property
    def gain(self) -> float:
        """The default's time over the winner's; 1 where the default stays."""
        return self.default_us / self.winner_us


@dataclass(frozen=True)
class Race:
    """Which of some calls is the fastest, and whether it beats the default for sure."""

    winner: str
    winner_us: float
    default_us: float
    scatter: float = 0.0


def race(timers: Mapping[str, Timer], default: str) -> Race:
    """The winner of some timers by median seconds; `default` unless a challenger beats it twice."""
    screened = _medians(interleaved(timers, seconds=0.0, least=SCREEN_ROUNDS, most=SCREEN_ROUNDS))
    limit = NEAR * min(screened.values())
    near = [name for name in sorted(screened, key=screened.__getitem__) if screened[name] <= limit]
    final = _rounds(timers, [default, *near[:FINALISTS]])
    times = _medians(final)
    best = fastest(times)
    if best != default and times[best] <= MARGIN * times[default]:
        final = _rounds(timers, [default, best])
        times = _medians(final)
    if times[best] > MARGIN * times[default]:
        best = default
    low, middle, high = quantiles(final[default], n=4)
    return Race(best, 1e6 * times[best], 1e6 * times[default], (high - low) / middle)


def fastest(seconds: Mapping[str, float]) -> str:
    """The name with the least time."""
    return min(seconds, key=seconds.__getitem__)


def measured(work: Launch, bench: Bench, store: Findings, *, again: bool = False) -> Outcome:
    """Tune one launch: compare, withdraw, time, and keep the winner in the store.

    A winner that the store has already is compared and not timed, unless `again`.
    """
    kept = None if again else store.finding(work.entry)
    if kept is not None and kept.us and kept.schedule in (RULE, *work.candidates):
        winner = work.default if kept.schedule == RULE else kept.schedule
        if winner in _usable(work, bench, store, [winner])[1]:
            return _outcome(work, store, Race(winner, kept.us, kept.default_us), known=True)
        # It has been withdrawn just now.
    found = _raced(work, bench, store, work.default)
    if found.winner != work.default and not _holds_for_fewer(work, found.winner, bench, store):
        found = replace(found, winner=work.default, winner_us=found.default_us)
    # The rule decides by the exact rows where it did not lose.
    schedule = RULE if found.winner == work.default else found.winner
    store.keep(work.entry, Winner(schedule, found.winner_us, found.default_us))
    return _outcome(work, store, found)


def _usable(
    work: Launch, bench: Bench, store: Findings, only: Iterable[str] = ()
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
    work: Launch, bench: Bench, store: Findings, default: str, only: Iterable[str] = ()
) -> Race:
    """The race of those that are usable; of `default` alone, without times, where it is not."""
    operands, usable = _usable(work, bench, store, only)
    if default not in usable:
        return Race("", 0.0, 0.0)
    # Timed calls may write into their operands, so all of them come after the comparisons.
    copies = bench.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    calls = {name: [partial(call, *own) for own in sets] for name, call in usable.items()}
    return race(bench.timers(calls), default)


def _holds_for_fewer(work: Launch, winner: str, bench: Bench, store: Findings) -> bool:
    """Whether the rule's own schedule for fewer rows of the bucket does not beat a winner there."""
    fewer = work.fewer
    if fewer is None or fewer.default == winner:
        return True
    return _raced(fewer, bench, store, winner, [winner]).winner == winner


def _outcome(work: Launch, store: Findings, found: Race, *, known: bool = False) -> Outcome:
    names = {name: of_work(work.entry, name) for name in work.candidates}
    withdrawn = store.withdrawn
    return Outcome(
        work=work,
        default=work.default,
        default_us=found.default_us,
        winner=found.winner,
        winner_us=found.winner_us,
        withdrawn={name: withdrawn[of] for name, of in names.items() if of in withdrawn},
        scatter=found.scatter,
        known=known,
    )


def _rounds(timers: Mapping[str, Timer], names: Iterable[str]) -> dict[str, list[float]]:
    least, most = FINAL_ROUNDS
    chosen = {name: timers[name] for name in names}
    return interleaved(chosen, seconds=FINAL_SECONDS, least=least, most=most)


def _medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items()}
