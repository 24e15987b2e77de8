"""The fastest schedules of this device, as `rl_consistency.tune` measured them, kept in a file.

A work is an op at one shape, its rows rounded up to a bucket; it has a name. A winner names one of
the op's own candidates, and the op looks the name up among them. So a file can make an op slower,
and it cannot make it run anything else. Where no candidate won, `RULE` is kept in its place: the
op's rule goes on to decide by the exact number of rows. All candidates of an op give the same
bytes: winners change no bit and are in no fingerprint. A candidate whose bytes differed is struck,
and stays struck.

Each identity (device, driver, versions, kernels) has its own file. Processes share it: they write
it whole, under a lock, and merge what they found. A file that is damaged, foreign or writable by
others is ignored with a warning, and its works are measured again.

State: the winners of each device of this process, and the picks that consulted them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import _lru_cache_wrapper, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from rl_consistency.kernels.core.cache.identity import CACHE_VARIABLE, cache_file, identity_of
from rl_consistency.kernels.core.cache.own_file import (
    UNUSABLE,
    locked,
    make_own,
    own_text,
    replace_whole,
)
from rl_consistency.kernels.core.compile_ahead import require_launches
from rl_consistency.kernels.core.grid import next_power_of_2

Schedule = TypeVar("Schedule")
Picked = TypeVar("Picked")

FOLDER = "tuned"
"""Name of the folder in the cache directory; it is the user's alone (mode 0700)."""

MOST_ROWS = 16384
"""The largest bucket; all larger numbers of rows share it."""

FEW_ROWS = 16
"""Numbers of rows from 2 up to this one share a bucket: no tile has fewer rows."""

RULE = "rule"
"""Name kept for a work that was measured and has no winner."""

SHORTEST_US, LONGEST_US = 1e-3, 1e9
"""Microseconds between which a time is believed."""

MOST_PICKS = 4096
"""Answers that each pick remembers."""

Struck = dict[str, dict[str, str]]
"""Work -> schedule -> why."""

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def rows_bucket(rows: int) -> int:
    """1, `FEW_ROWS`, or the next power of two up to `MOST_ROWS`."""
    if rows <= 1:
        return 1
    return min(max(next_power_of_2(rows), FEW_ROWS), MOST_ROWS)


def work_name(op: str, *parts: Any, rows: int) -> str:
    """How files and reports spell a work: `matmul/nt/bf16/bf16/tma/n4096/k1024/m16`, say."""
    spelled = [_DTYPES.get(part, part) for part in parts]
    return "/".join([op, *map(str, spelled), f"m{rows_bucket(rows)}"])


def schedule_name(schedule: Any) -> str:
    """A schedule's own name, or its fields that are not defaults."""
    if isinstance(schedule, str):
        return schedule
    if hasattr(schedule, "name"):
        return schedule.name
    values = {f.name: (getattr(schedule, f.name), f.default) for f in fields(schedule)}
    return " ".join(f"{name}={value}" for name, (value, usual) in values.items() if value != usual)


@dataclass(frozen=True)
class Winner:
    """The fastest candidate of one work."""

    schedule: str
    """Name of the candidate, or `RULE`."""
    us: float
    """Median time of the candidate, in microseconds."""
    default_us: float
    """Median time of what runs without a winner, in microseconds."""

    @classmethod
    def parse(cls, entry: Any) -> Winner:
        """A winner from its entry in a file; TypeError for other fields or types."""
        winner = cls(**entry)
        times = winner.us, winner.default_us
        if type(winner.schedule) is not str or not all(map(_is_time, times)):
            raise TypeError(f"not a winner: {entry}")
        return winner


def _is_time(value: Any) -> bool:
    return type(value) is float and SHORTEST_US <= value <= LONGEST_US


@dataclass(frozen=True)
class _Found:
    """What a file holds."""

    winners: dict[str, Winner] = field(default_factory=dict)
    struck: Struck = field(default_factory=dict)

    @classmethod
    def parse(cls, content: Any, identity: Mapping[str, str]) -> _Found:
        if content["identity"] != identity:
            raise ValueError("it is of another device, driver or version")
        struck = content["struck"]
        if any(type(reasons) is not dict for reasons in struck.values()):
            raise TypeError("not reasons: struck")
        texts = [text for reasons in struck.values() for pair in reasons.items() for text in pair]
        if not all(type(text) is str for text in texts):
            raise TypeError("not reasons: struck")
        winners = {work: Winner.parse(entry) for work, entry in content["winners"].items()}
        return cls(winners, struck)


class TunedSchedules:
    """Winners and struck candidates by work.

    Args:
        path: their file, read now and rewritten at each finding; None keeps them in memory.
        identity: what they hold for.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, str]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._told: set[str] = set()
        self._unsaved: dict[str, Winner] = {}  # found here, and not in the file yet
        found = self._read()
        self._winners, self._struck = found.winners, found.struck

    @classmethod
    def of_device(cls, device: torch.device) -> TunedSchedules:
        """The schedules of a device with the installed versions; in memory if it is no GPU."""
        if device.type != "cuda":
            return cls(None, {})
        identity = identity_of(device)
        path = cache_file("schedules", identity)
        return cls(path and path.parent / FOLDER / path.name, identity)

    @property
    def winners(self) -> dict[str, Winner]:
        """Winners that are in force, by work."""
        found = {work: self.winner(work) for work in self._winners}
        return {work: winner for work, winner in found.items() if winner is not None}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was found for any work."""
        return not self._winners

    @property
    def struck(self) -> Struck:
        """Candidates whose bytes differed, and why they were struck."""
        return {work: dict(reasons) for work, reasons in self._struck.items()}

    def winner(self, work: str) -> Winner | None:
        """The winner of a work, if it has one that was not struck."""
        found = self.finding(work)
        return None if found is None or found.schedule == RULE else found

    def finding(self, work: str) -> Winner | None:
        """The winner or `RULE`, if the work was measured and the winner not struck since."""
        found = self._winners.get(work)
        return None if found is None or self.is_struck(work, found.schedule) else found

    def is_struck(self, work: str, schedule: str) -> bool:
        """Whether a candidate's bytes ever differed."""
        return schedule in self._struck.get(work, {})

    def keep(self, work: str, winner: Winner) -> None:
        """Take what was found for a work, also in the file."""
        require_launches("a winner")
        self._winners[work] = self._unsaved[work] = winner
        self._write()

    def strike(self, work: str, schedule: str, reason: str) -> None:
        """Withdraw a candidate for good, also in the file."""
        require_launches("the withdrawal of a schedule")
        self._struck.setdefault(work, {})[schedule] = reason
        self._write()

    def ignore(self, work: str, reason: str) -> None:
        """Warn once that a winner is not used."""
        self._winners.pop(work, None)
        self._unsaved.pop(work, None)
        self._tell("winner", f"{self.path}: the winner of {work} is ignored: {reason}.")

    def _read(self) -> _Found:
        if self.path is None:
            return _Found()
        try:
            return _Found.parse(json.loads(own_text(self.path)), self._identity)
        except FileNotFoundError:
            return _Found()
        except UNUSABLE as error:
            reason = f"{type(error).__name__}: {error}"
            self._tell("read", f"{self.path} is ignored ({reason}); `tune` measures it again.")
            return _Found()

    def _write(self) -> None:
        if self.path is not None:
            try:
                was_own = make_own(self.path.parent)
                # Without the lock, two processes that write at once could lose what one found.
                with locked(self.path.with_suffix(".lock")):
                    self._merge(self._read() if was_own else _Found())
                    self._replace(self.path)
                self._unsaved.clear()
            except OSError as error:
                text = f"{self.path} cannot be written ({error}); winners last for this process."
                self._tell("write", f"{text} Set {CACHE_VARIABLE} to a directory with room.")
        forget_picks()

    def _merge(self, found: _Found) -> None:
        """Add what the file has. It is newer than what was read or written before, and older than
        what could not be written yet."""
        self._winners = self._winners | found.winners | self._unsaved
        for work, reasons in found.struck.items():
            self._struck[work] = reasons | self._struck.get(work, {})

    def _replace(self, path: Path) -> None:
        content = {
            "identity": self._identity,
            "winners": {work: asdict(self._winners[work]) for work in sorted(self._winners)},
            "struck": {work: self._struck[work] for work in sorted(self._struck)},
        }
        replace_whole(path, content)

    def _tell(self, kind: str, text: str) -> None:
        """Warn, once for each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"tuned schedules: {text} Nothing else is affected.", stacklevel=4)


_by_device: dict[torch.device, TunedSchedules] = {}
"""The winners of each device, process-wide."""

_picks: list[Callable[[], None]] = []
"""Empties what each pick remembers."""


def tuned_schedules(device: torch.device) -> TunedSchedules:
    """The winners of a device; the first call reads them from its file."""
    if device not in _by_device:
        _by_device[device] = TunedSchedules.of_device(device)
    return _by_device[device]


def struck_schedules() -> list[str]:
    """`work: schedule` of every struck candidate that this process knows of."""
    pairs = {
        f"{work}: {schedule}"
        for store in _by_device.values()
        for work, reasons in store.struck.items()
        for schedule in reasons
    }
    return sorted(pairs)


def chosen(device: torch.device | None, work: str, own: Mapping[str, Schedule]) -> Schedule | None:
    """The schedule that won a work, of the op's `own` by name; None where the op's rule decides.

    Without a device there are no winners: that is the op's rule alone.
    """
    winner = None if device is None else tuned_schedules(device).winner(work)
    if device is None or winner is None:
        return None
    if winner.schedule not in own:
        reason = f"{winner.schedule!r} is no schedule of this op"
        tuned_schedules(device).ignore(work, reason)
        return None
    return own[winner.schedule]


def picked_once(pick: Callable[..., Picked]) -> _lru_cache_wrapper[Picked]:
    """A pick that remembers its answers until a winner changes."""
    remembered = lru_cache(maxsize=MOST_PICKS)(pick)
    forget_on_change(remembered.cache_clear)
    return remembered


def forget_on_change(forget: Callable[[], None]) -> None:
    """Have `forget` called whenever a winner changes: what it empties was made from picks."""
    _picks.append(forget)


def forget_picks() -> None:
    """Let every pick look at the winners again."""
    for forget in _picks:
        forget()
