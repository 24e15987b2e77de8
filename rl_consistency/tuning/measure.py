"""The measurement of one work: bytes first, then times; a challenger has to win twice.

All candidates run a few rounds. Those near the fastest go on for more, beside the default. The
fastest of these takes its place only if it is faster by `MARGIN`, and again so in a second
measurement of the two alone. Then it meets what the op's rule takes for fewer rows of the bucket,
and must not lose by `MARGIN` there. Else the rule stays in force, for every number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, quantiles

from torch import Tensor

from rl_consistency.kernels.core.cache.tuned_schedules import RULE, TunedSchedules, Winner
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.schedules import LIBRARY, TRITON
from rl_consistency.tuning.stopwatch import Bench, Call, Timer, interleaved
from rl_consistency.tuning.work import Op, Work, compare

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
    """What was found for one work."""

    work: Work
    default: str
    """What runs without a winner: a schedule, or `library`."""
    default_us: float
    winner: str
    winner_us: float
    struck: dict[str, str] = field(default_factory=dict)
    """Candidates whose bytes differ: why."""
    unable: dict[str, str] = field(default_factory=dict)
    """Candidates that do not fit this device: why."""
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
    scatter: float


def race(timers: Mapping[str, Timer], default: str) -> Race:
    """The winner of some timers by median seconds; `default` unless a challenger beats it twice."""
    screened = _medians(interleaved(timers, seconds=0.0, least=SCREEN_ROUNDS, most=SCREEN_ROUNDS))
    limit = NEAR * min(screened.values())
    near = [name for name in sorted(screened, key=screened.__getitem__) if screened[name] <= limit]
    final = _rounds(timers, dict.fromkeys([default, *near[:FINALISTS]]))
    best = fastest(_medians(final))
    times = _medians(final)
    if best != default and times[best] <= MARGIN * times[default]:
        final = _rounds(timers, (default, best))
        times = _medians(final)
    if times[best] > MARGIN * times[default]:
        best = default
    return Race(best, 1e6 * times[best], 1e6 * times[default], _scatter(final[default]))


def fastest(seconds: Mapping[str, float]) -> str:
    """The name with the least time."""
    return min(seconds, key=seconds.__getitem__)


def measured(work: Work, bench: Bench, store: TunedSchedules, *, again: bool = False) -> Outcome:
    """Tune one work: compare, strike, time, and keep the winner in the store.

    A winner that the store has already is compared and not timed, unless `again`.
    """
    known = None if again else _known(work, store)
    field = _entered(work, bench, store, known or ())
    if known is not None and known[0] in field.usable:
        return _of_the_store(work, store)
    if known is not None:  # it has been struck just now
        return measured(work, bench, store, again=True)
    return _timed(field, bench, store)


@dataclass(frozen=True)
class _Field:
    """Who may run for a work: the schedules and other ways with the reference's bytes."""

    work: Work
    operands: tuple[Tensor, ...]
    usable: dict[str, Op]
    unable: dict[str, str]
    differing: dict[str, int]

    def timers(self, bench: Bench) -> dict[str, Timer]:
        # Timed calls may write into their operands, so all of them come after the comparisons.
        copies = bench.copies(sum(x.nbytes for x in self.operands))
        sets = [self.operands, *(self.work.operands() for _ in range(copies - 1))]
        return bench.timers({name: _on(call, sets) for name, call in self.usable.items()})


def _entered(work: Work, bench: Bench, store: TunedSchedules, only: Sequence[str]) -> _Field:
    """Compare all ways of a work, or `only` some and the default; strike those of other bytes."""
    operands = work.operands()
    bench.prepare([partial(call, *operands) for call in _calls(work, only)])
    found = compare(work, operands, tuple(only))
    used = store.winner(work.entry)
    for name, reason in found.struck.items():
        store.strike(work.entry, name, reason)
        if used is not None and used.schedule == name:
            # What was computed with it, an engine's graphs and keys, has to go.
            audit.withdraw(f"{work.entry}: {name}")
    # What was struck earlier stays so, whatever it gave today.
    struck = store.struck.get(work.entry, {})
    usable = {n: call for n, call in found.equal.items() if n == work.default or n not in struck}
    return _Field(work, operands, usable, found.unable, found.differing)


def _timed(field: _Field, bench: Bench, store: TunedSchedules) -> Outcome:
    """Race, keep what won in the store, and tell."""
    work, timers = field.work, field.timers(bench)
    schedules = {name: timer for name, timer in timers.items() if name not in work.others}
    first = race(schedules, work.default)
    if first.winner != work.default and not _holds_for_fewer(work, first.winner, bench, store):
        first = replace(first, winner=work.default, winner_us=first.default_us)
    store.keep(work.entry, _finding(first, work.default))
    default, winner, times, scatter = work.default, first.winner, first, first.scatter
    # Without the canonical bytes the library gets no certificate, and its time does not matter.
    ways = [name for name in work.others if field.differing.get(name) == 0]
    if work.library_entry and not ways:
        store.keep(work.library_entry, Winner(TRITON, first.winner_us, first.winner_us))
    elif work.library_entry:
        (library,) = ways
        rule = LIBRARY if work.library_picked else TRITON
        second = race({LIBRARY: timers[library], TRITON: schedules[first.winner]}, rule)
        if second.winner != rule and not _way_holds_for_fewer(work, second.winner, bench, store):
            second = replace(second, winner=rule, winner_us=second.default_us)
        store.keep(work.library_entry, _finding(second, rule))
        scatter = max(scatter, second.scatter)
        if second.winner == LIBRARY:
            winner = LIBRARY
            times = replace(first, winner_us=second.winner_us)
        if work.library_picked:
            default, times = LIBRARY, second
    return Outcome(
        work=work,
        default=default,
        default_us=times.default_us,
        winner=winner,
        winner_us=times.winner_us,
        struck=dict(store.struck.get(work.entry, {})),
        unable=field.unable,
        scatter=scatter,
    )


def _finding(found: Race, rule: str) -> Winner:
    """What the store keeps of a race: the rule decides by the exact rows where it did not lose."""
    schedule = RULE if found.winner == rule else found.winner
    return Winner(schedule, found.winner_us, found.default_us)


def _holds_for_fewer(work: Work, winner: str, bench: Bench, store: TunedSchedules) -> bool:
    """Whether the rule's own schedule for fewer rows of the bucket does not beat a winner there."""
    fewer = work.fewer
    if fewer is None or fewer.default == winner:
        return True
    field = _entered(fewer, bench, store, (winner,))
    return winner in field.usable and race(field.timers(bench), winner).winner == winner


def _way_holds_for_fewer(work: Work, way: str, bench: Bench, store: TunedSchedules) -> bool:
    """Whether a way that wins, the library or a schedule, wins for fewer rows of the bucket too."""
    fewer = work.fewer
    if fewer is None or fewer.library_picked == (way == LIBRARY):
        return True
    kept = store.winner(fewer.entry)
    schedule = fewer.default if kept is None else kept.schedule
    field = _entered(fewer, bench, store, (schedule, *fewer.others))
    timers, (library,) = field.timers(bench), fewer.others
    if schedule not in timers or field.differing[library]:
        # A schedule that is struck just now wins nothing; a library that differs never runs.
        return schedule in timers
    return race({LIBRARY: timers[library], TRITON: timers[schedule]}, way).winner == way


def _of_the_store(work: Work, store: TunedSchedules) -> Outcome:
    """A known work's outcome, with the times of an earlier measurement."""
    kept, choice = store.finding(work.entry), store.finding(work.library_entry)
    assert kept is not None
    rule = LIBRARY if work.library_picked else TRITON
    way = rule if choice is None or choice.schedule == RULE else choice.schedule
    by_library = choice is not None and way == LIBRARY
    schedule = work.default if kept.schedule == RULE else kept.schedule
    of_winner = choice if choice is not None and (by_library or work.library_picked) else kept
    of_default = choice if choice is not None and work.library_picked else kept
    return Outcome(
        work=work,
        default=LIBRARY if work.library_picked else work.default,
        default_us=of_default.default_us,
        winner=LIBRARY if by_library else schedule,
        winner_us=of_winner.us,
        struck=dict(store.struck.get(work.entry, {})),
        known=True,
    )


def _known(work: Work, store: TunedSchedules) -> tuple[str, ...] | None:
    """The winner that the store has, if it has all that this work would give."""
    kept, choice = store.finding(work.entry), store.finding(work.library_entry)
    if kept is None or kept.schedule not in (RULE, *work.candidates):
        return None
    if work.library_entry and (choice is None or choice.schedule not in (RULE, LIBRARY, TRITON)):
        return None
    return (work.default if kept.schedule == RULE else kept.schedule,)


def _calls(work: Work, only: Sequence[str]) -> list[Op]:
    names = dict.fromkeys([work.default, *only]) if only else work.candidates
    return [work.candidates[name] for name in names if name in work.candidates]


def _on(call: Op, sets: Sequence[tuple[Tensor, ...]]) -> list[Call]:
    return [partial(call, *operands) for operands in sets]


def _rounds(timers: Mapping[str, Timer], names: Sequence[str] | dict[str, None]):
    least, most = FINAL_ROUNDS
    chosen = {name: timers[name] for name in names}
    return interleaved(chosen, seconds=FINAL_SECONDS, least=least, most=most)


def _medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items()}


def _scatter(samples: Sequence[float]) -> float:
    low, middle, high = quantiles(samples, n=4)
    return (high - low) / middle
