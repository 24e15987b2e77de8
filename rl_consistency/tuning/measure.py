"""The measurement of one work: bytes first, then times; a challenger has to win twice.

All candidates run a few rounds. Those near the fastest go on for more, beside the default. The
fastest of these takes its place only if it is faster by `MARGIN`, and again so in a second
measurement of the two alone. So no winner is slower than what runs without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

from torch import Tensor

from rl_consistency.kernels.core.tuned_schedules import TunedSchedules, Winner
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
    operands = work.operands()
    known = None if again else _known(work, store)
    bench.prepare([partial(call, *operands) for call in _calls(work, known)])
    found = compare(work, operands, () if known is None else known)
    used = store.winner(work.entry)
    for name, reason in found.struck.items():
        store.strike(work.entry, name, reason)
        if used is not None and used.schedule == name:
            # What was computed with it, an engine's graphs and keys, has to go.
            audit.withdraw(f"{work.entry}: {name}")
    # What was struck earlier stays so, whatever it gave today.
    struck = store.struck.get(work.entry, {})
    usable = {
        name: call
        for name, call in found.equal.items()
        if name == work.default or name not in struck
    }
    if known is not None and known[0] in usable:
        return _of_the_store(work, store, struck)
    if known is not None:  # it has been struck just now
        return measured(work, bench, store, again=True)
    return _timed(work, bench, store, operands, usable, struck, found.unable, found.differing)


def _timed(
    work: Work, bench: Bench, store: TunedSchedules, operands: tuple[Tensor, ...],
    usable: Mapping[str, Op], struck: dict[str, str], unable: dict[str, str],
    differing: Mapping[str, int],
) -> Outcome:  # fmt: skip
    # Timed calls may write into their operands, so all of them come after the comparisons.
    copies = bench.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    timers = bench.timers({name: _on(call, sets) for name, call in usable.items()})
    schedules = {name: timer for name, timer in timers.items() if name not in work.others}
    first = race(schedules, work.default)
    store.keep(work.entry, Winner(first.winner, first.winner_us, first.default_us))
    default, default_us = work.default, first.default_us
    winner, winner_us, scatter = first.winner, first.winner_us, first.scatter
    # Without the canonical bytes the library gets no certificate, and its time does not matter.
    ways = [name for name in work.others if differing.get(name) == 0]
    if work.library_entry and not ways:
        store.keep(work.library_entry, Winner(TRITON, winner_us, winner_us))
    elif work.library_entry:
        (library,) = ways
        against = {LIBRARY: timers[library], TRITON: schedules[first.winner]}
        second = race(against, LIBRARY if work.library_picked else TRITON)
        choice = Winner(second.winner, second.winner_us, second.default_us)
        store.keep(work.library_entry, choice)
        scatter = max(scatter, second.scatter)
        if second.winner == LIBRARY:
            winner, winner_us = LIBRARY, second.winner_us
        if work.library_picked:
            default, default_us, winner_us = LIBRARY, second.default_us, second.winner_us
    return Outcome(
        work=work,
        default=default,
        default_us=default_us,
        winner=winner,
        winner_us=winner_us,
        struck=struck,
        unable=unable,
        scatter=scatter,
    )


def _of_the_store(work: Work, store: TunedSchedules, struck: dict[str, str]) -> Outcome:
    """A known work's outcome, with the times of an earlier measurement."""
    kept, choice = store.winner(work.entry), store.winner(work.library_entry)
    assert kept is not None
    by_library = choice is not None and choice.schedule == LIBRARY
    of_winner = choice if choice is not None and (by_library or work.library_picked) else kept
    of_default = choice if choice is not None and work.library_picked else kept
    return Outcome(
        work=work,
        default=LIBRARY if work.library_picked else work.default,
        default_us=of_default.default_us,
        winner=LIBRARY if by_library else kept.schedule,
        winner_us=of_winner.us,
        struck=struck,
        known=True,
    )


def _known(work: Work, store: TunedSchedules) -> tuple[str, ...] | None:
    """The winner that the store has, if it has all that this work would give."""
    kept, choice = store.winner(work.entry), store.winner(work.library_entry)
    if kept is None or kept.schedule not in work.candidates:
        return None
    if work.library_entry and (choice is None or choice.schedule not in (LIBRARY, TRITON)):
        return None
    return (kept.schedule,)


def _calls(work: Work, only: Sequence[str] | None) -> list[Op]:
    names = work.candidates if only is None else dict.fromkeys([work.default, *only])
    return [work.candidates[name] for name in names]


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
