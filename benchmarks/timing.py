"""Timing on a CUDA device: contestants interleaved in one process, medians, cold cache.

A contestant's operands rotate (several copies, together larger than the cache) or the cache is
overwritten before each call, because inside a model weights come from memory too. Short calls are
timed as one CUDA graph over all copies. Longer calls are timed by events, and the device is held
back until the host has queued the whole call. Stock and peers run under the library settings that
this process started with, ours under `numeric_settings`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity
from triton.errors import TritonError

from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.numerics.settings import SETTINGS, numeric_settings
from rl_consistency.tuning.stopwatch import Call, ColdDevice, interleaved

Context = Callable[[], AbstractContextManager[Any]]
Clock = Literal["events", "graph", "wall"]
"""`events`: one call on the device; `graph`: all copies in one CUDA graph; `wall`: the host's clock
around one whole call."""

SLEEP_CYCLES_PER_SECOND = 2.0e9
LONGEST_HOLD = 4e-3
"""Seconds for which the device is held back at most while the host queues a call."""

UNAVAILABLE = (
    AssertionError, AttributeError, ImportError, RuntimeError, TritonError, TypeError, ValueError,
)  # fmt: skip
"""What a stock backend or a peer raises where it does not cover a shape, a device or a version."""

LIBRARY_DEFAULTS = tuple(setting.read() for setting in SETTINGS)
"""The settings of a process that has not set any: read when this module is imported."""

ROUNDS = {"seconds": 0.12, "least": 7, "most": 60}
"""All rounds of a case take about so many seconds, where `least` and `most` allow it."""

IDLE_ROUNDS = 3
"""Pairs of a timed and a traced call."""


def reason(error: BaseException) -> str:
    """Why a way is unavailable, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextmanager
def library_defaults() -> Iterator[None]:
    """Process-wide numeric settings as torch ships them, inside the block."""
    before = tuple(setting.read() for setting in SETTINGS)
    _write_settings(LIBRARY_DEFAULTS)
    try:
        yield
    finally:
        _write_settings(before)


def _write_settings(values: Sequence[Any]) -> None:
    for setting, value in zip(SETTINGS, values, strict=True):
        if setting.read() != value:
            setting.write(value)


@dataclass(frozen=True)
class Contestant:
    """One way to do the work."""

    calls: Sequence[Call]
    """The work on each copy of its operands."""
    context: Context = nullcontext
    """Entered around every call, outside what is timed."""
    warmups: int = 1
    """Calls on the first copy, after one on each, before anything is timed."""

    @classmethod
    def of(cls, call: Call) -> Contestant:
        """A contestant with one copy of its operands."""
        return cls((call,))


@dataclass(frozen=True, kw_only=True)
class Race:
    """What a case hands to `Machine.measure`."""

    ours: Contestant
    stock: Mapping[str, Contestant]
    """Ways that come with torch or Hugging Face; the fastest one counts."""
    peers: Mapping[str, Contestant] = field(default_factory=dict)
    clock: Clock = "events"
    moved_bytes: float = 0.0
    """Bytes that have to be read and written once."""
    operations: float = 0.0
    """Multiplications and additions on the matrix units."""
    tokens: int = 0
    """Tokens of a call, for tokens per second; 0 reports none."""
    memory: bool = False
    """Whether the peak memory of one call is measured."""


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches today: bytes and operations per second."""

    copy_bandwidth: float
    matmul_rate: float

    def seconds(self, race: Race) -> float:
        """The least time the work can take: the slower of moving its bytes and computing."""
        return max(race.moved_bytes / self.copy_bandwidth, race.operations / self.matmul_rate)


class Machine(ColdDevice):
    """The CUDA device under test."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.ceilings = self._measure_ceilings()

    def measure(self, race: Race) -> dict[str, Any]:
        """Time all contestants and give the fields of a row.

        A peer or a stock way that cannot run the shape is named in `unavailable`. An error of ours
        passes through; RuntimeError where neither a stock way nor a peer runs, unless all of them
        lack the memory that ours has enough of.
        """
        timers: dict[str, Callable[[int], float]] = {}
        peaks: dict[str, int] = {}
        unavailable: dict[str, str] = {}
        for name, contestant in {"ours": race.ours, **race.stock, **race.peers}.items():
            settings = numeric_settings if name == "ours" else library_defaults
            before = self._taken()
            try:
                timers[name] = self._prepared(contestant, race.clock, settings)
                if race.memory:
                    peaks[name] = self._peak(contestant, settings, before)
            except UNAVAILABLE as error:
                if name == "ours":
                    raise
                unavailable[name] = reason(error)
        lacking = all("OutOfMemoryError" in why for why in unavailable.values())
        if timers.keys() == {"ours"} and not lacking:
            raise RuntimeError(f"no stock way runs this shape: {unavailable}")
        medians = self._interleaved(timers)
        ceiling = self.ceilings.seconds(race)
        return row_fields(race, medians, peaks, ceiling) | {"unavailable": unavailable}

    def _prepared(
        self, contestant: Contestant, clock: Clock, settings: Context = nullcontext
    ) -> Callable[[int], float]:
        """Warm up, and give the function that times round i in seconds."""
        calls, context, host = contestant.calls, contestant.context, 0.0
        if clock == "graph":
            with settings(), context():
                return self.timers({"": calls})[""]
        with settings(), context():
            for call in (*calls, *[calls[0]] * contestant.warmups):
                started = finished_seconds(self.device)
                call()
                host = time.perf_counter() - started
            torch.cuda.synchronize()

        def wall(i: int) -> float:
            with settings(), context():
                started = finished_seconds(self.device)
                calls[i % len(calls)]()
                return finished_seconds(self.device) - started

        def events(i: int) -> float:
            with settings(), context():
                hold = int(min(1.5 * host, LONGEST_HOLD) * SLEEP_CYCLES_PER_SECOND)
                return self.device_seconds(calls[i % len(calls)], hold)

        return wall if clock == "wall" else events

    def _interleaved(self, timers: Mapping[str, Callable[[int], float]]) -> dict[str, float]:
        """Median seconds of each; every round times all of them, each round another one first."""
        samples = interleaved(timers, **ROUNDS)
        self._trim()
        return {name: median(values) for name, values in samples.items()}

    def peak_bytes(self, contestant: Contestant) -> int:
        """Bytes at the peak of one call of a contestant that is not ours, under the library's
        settings."""
        return self._peak(contestant, library_defaults, self._taken())

    def idle_share(self, contestant: Contestant) -> float:
        """The share of the time of a call of ours in which the device waits.

        Calls are timed and traced in turn, since a device that gets warm gets slower: by medians,
        the time of the former that the kernels of the latter leave."""
        timer = self._prepared(contestant, "wall", numeric_settings)
        pairs = [(timer(i), self._busy_seconds(contestant)) for i in range(IDLE_ROUNDS)]
        wall, busy = (median(seconds) for seconds in zip(*pairs, strict=True))
        return max(1 - busy / wall, 0.0)

    def _busy_seconds(self, contestant: Contestant) -> float:
        """Seconds of one call of ours in which the device works, those of overlapping kernels once.
        The trace slows the host down, and not the kernels."""
        with numeric_settings(), contestant.context():
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
                contestant.calls[0]()
                torch.cuda.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in trace.events() or ()
            if event.device_type.name == "CUDA"
        ]
        return 1e-6 * covered(spans)

    def _peak(self, contestant: Contestant, settings: Context, before: int) -> int:
        """Bytes at the peak of a call beyond those before the contestant's first call, so that
        what it keeps from call to call counts."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        with settings(), contestant.context():
            contestant.calls[0]()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device) + held_by_graphs() - before

    def _taken(self) -> int:
        """Bytes that are allocated, or that captured graphs keep."""
        gc.collect()
        torch.cuda.empty_cache()  # graphs that are gone leave their pool to the allocator
        return torch.cuda.memory_allocated(self.device) + held_by_graphs()

    def _trim(self) -> None:
        if 2 * torch.cuda.memory_reserved(self.device) > torch.cuda.mem_get_info(self.device)[1]:
            torch.cuda.empty_cache()

    def _measure_ceilings(self) -> Ceilings:
        """Copy bandwidth (read + write) over 1 GiB, and the rate of an 8192^3 bf16 product."""
        source = torch.zeros(1 << 30, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        size = 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(a)
        calls: dict[str, Call] = {
            "copy": lambda: target.copy_(source),
            "multiply": lambda: torch.mm(a, b.t(), out=product),
        }
        timers = {n: self._prepared(Contestant.of(call), "events") for n, call in calls.items()}
        seconds = self._interleaved(timers)
        return Ceilings(2 * source.numel() / seconds["copy"], 2 * size**3 / seconds["multiply"])


def held_by_graphs() -> int:
    """Bytes in the pools of captured graphs that the allocator counts as free."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans, each a start and an end."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def row_fields(
    race: Race, seconds: Mapping[str, float], peaks: Mapping[str, int], ceiling_seconds: float
) -> dict[str, Any]:
    """Fields of a row from median seconds by contestant."""
    ours = seconds["ours"]
    ran = race.stock.keys() & seconds.keys()
    stock = min(ran, key=lambda name: (seconds[name], name)) if ran else None
    others = race.peers.keys() | (race.stock.keys() if len(race.stock) > 1 else set())

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {("stock" if name == stock else name): value for name, value in values.items()}

    rates = {name: race.tokens / s for name, s in seconds.items()} if race.tokens else {}
    against = {} if stock is None else against_stock(ours, seconds[stock], stock)
    return (
        {"ours_us": ours * 1e6}
        | against
        | {
            "peers": {name: s * 1e6 for name, s in seconds.items() if name in others},
            "ceiling_fraction": ceiling_seconds / ours if ceiling_seconds else None,
            "peak_bytes": renamed(peaks),
            "tokens_per_second": renamed(rates),
        }
    )


def against_stock(ours: float, stock: float, name: str, tokens: int = 0) -> dict[str, Any]:
    """The fields of a row that has both times, in seconds; with `tokens`, of each, their rates."""
    rates = {"ours": tokens / ours, "stock": tokens / stock} if tokens else {}
    fields = {"ours_us": ours * 1e6, "stock_us": stock * 1e6, "stock": name, "ratio": stock / ours}
    return fields | {"tokens_per_second": rates}
