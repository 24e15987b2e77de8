"""How far a run is before its first step and within a step, and how long it still takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter

RECENT = 5
"""Steps whose mean time is the estimate of those to come."""


@dataclass
class Progress:
    """Told by the trainer what is done of which phase; `listener` is given a line about it.

    The first step is no measure once there are others: it compiles.
    """

    steps: int
    compiles: bool = False
    """Whether the first step also compiles kernels and captures graphs, on a GPU."""
    listener: Callable[[str], None] | None = None
    starts: Callable[[str], None] = lambda phase: None
    """Called with each phase before the first step; "" after the last one."""
    clock: Callable[[], float] = perf_counter
    notice: str = ""
    """A text that is told with all that follows."""
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _timed: int = 0
    _step: int = 0
    _since: float = 0.0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Time the step inside the block."""
        self._step, self._since = step, self.clock()
        yield
        if self._timed == 1:  # the first one compiles
            self._seconds.clear()
        self._timed += 1
        self._seconds.append(self.clock() - self._since)

    def tell(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Say how much of a phase of the step is done; 0 of 0 where that is not counted."""
        if self.listener is None:
            return
        text = f"step {self._step}/{self.steps}: {phase}{f' {done}/{total}' if total else ''}"
        if (left := self.seconds_left()) is not None:
            text += f", about {duration(left)} left"
        elif self.compiles:
            text += ", with kernels to compile and graphs to capture"
        self.listener(text + (f", {self.notice}" if self.notice else ""))

    def seconds_left(self) -> float | None:
        """Seconds that the whole run still takes, by the last steps; None in the first one."""
        if not self._seconds:
            return None
        mean = fmean(self._seconds)
        this = max(mean - (self.clock() - self._since), 0.0)
        return this + mean * (self.steps - self._step)


def duration(seconds: float) -> str:
    """A duration as people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
