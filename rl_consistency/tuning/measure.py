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

from rl_consistency.kernels.core.findings import RULE, Findings, Winner, of_work
from rl_consistency.kernels.matmul import audit
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
    """The schedule that runs without a winner."""
    default_us: float
    winner: str
    winner_us: float
    withdrawn: dict[str, str] = field(default_factory=dict)
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


def measured(work: Work, bench: Bench, store: Findings, *, again: bool = False) -> Outcome:
    """Tune one work: compare, withdraw, time, and keep the winner in the store.

    A winner that the store has already is compared and not timed, unless `again`.
    """
    known = None if again else _known(work, store)
    field = _entered(work, bench, store, known or ())
    if known is not None and known[0] in field.usable:
        return _of_the_store(work, store)
    if known is not None:  # it has been withdrawn just now
        return measured(work, bench, store, again=True)
    return _timed(field, bench, store)


@dataclass(frozen=True)
class _Field:
    """Who may run for a work: the schedules with the reference's bytes."""

    work: Work
    operands: tuple[Tensor, ...]
    usable: dict[str, Op]
    unable: dict[str, str]

    def timers(self, bench: Bench) -> dict[str, Timer]:
        # Timed calls may write into their operands, so all of them come after the comparisons.
        copies = bench.copies(sum(x.nbytes for x in self.operands))
        sets = [self.operands, *(self.work.operands() for _ in range(copies - 1))]
        return bench.timers({name: _on(call, sets) for name, call in self.usable.items()})


def _entered(work: Work, bench: Bench, store: Findings, only: Sequence[str]) -> _Field:
    """Compare the candidates of a work, or `only` some and the default; withdraw those of other
    bytes."""
    operands = work.operands()
    bench.prepare([partial(call, *operands) for call in _calls(work, only)])
    found = compare(work, operands, tuple(only) or tuple(work.candidates))
    used = store.winner(work.entry)
    for name, reason in found.withdrawn.items():
        store.withdraw(of_work(work.entry, name), reason)
        if used is not None and used.schedule == name:
            # What was computed with it, an engine's graphs and keys, has to go.
            audit.withdraw(of_work(work.entry, name))
    # What was withdrawn earlier stays so, whatever it gave today.
    usable = {
        name: call
        for name, call in found.equal.items()
        if name == work.default or not store.is_withdrawn(work.entry, name)
    }
    return _Field(work, operands, usable, found.unable)


def _timed(field: _Field, bench: Bench, store: Findings) -> Outcome:
    """Race, keep what won in the store, and tell."""
    work = field.work
    first = race(field.timers(bench), work.default)
    if first.winner != work.default and not _holds_for_fewer(work, first.winner, bench, store):
        first = replace(first, winner=work.default, winner_us=first.default_us)
    store.keep(work.entry, _finding(first, work.default))
    return Outcome(
        work=work,
        default=work.default,
        default_us=first.default_us,
        winner=first.winner,
        winner_us=first.winner_us,
        withdrawn=_withdrawn(work, store),
        unable=field.unable,
        scatter=first.scatter,
    )


def _withdrawn(work: Work, store: Findings) -> dict[str, str]:
    """The candidates of a work that were withdrawn: why."""
    known = store.withdrawn
    names = {name: of_work(work.entry, name) for name in work.candidates}
    return {name: known[of] for name, of in names.items() if of in known}


def _finding(found: Race, rule: str) -> Winner:
    """What the store keeps of a race: the rule decides by the exact rows where it did not lose."""
    schedule = RULE if found.winner == rule else found.winner
    return Winner(schedule, found.winner_us, found.default_us)


def _holds_for_fewer(work: Work, winner: str, bench: Bench, store: Findings) -> bool:
    """Whether the rule's own schedule for fewer rows of the bucket does not beat a winner there."""
    fewer = work.fewer
    if fewer is None or fewer.default == winner:
        return True
    field = _entered(fewer, bench, store, (winner,))
    return winner in field.usable and race(field.timers(bench), winner).winner == winner


def _of_the_store(work: Work, store: Findings) -> Outcome:
    """A known work's outcome, with the times of an earlier measurement."""
    kept = store.finding(work.entry)
    assert kept is not None
    return Outcome(
        work=work,
        default=work.default,
        default_us=kept.default_us,
        winner=work.default if kept.schedule == RULE else kept.schedule,
        winner_us=kept.us,
        withdrawn=_withdrawn(work, store),
        known=True,
    )


def _known(work: Work, store: Findings) -> tuple[str, ...] | None:
    """The winner that the store has, with its times."""
    kept = store.finding(work.entry)
    if kept is None or not kept.us or kept.schedule not in (RULE, *work.candidates):
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
