"""Timing of contestants side by side: interleaved in one process, medians, cold cache.

A contestant's operands rotate (several copies, together larger than the cache) or the cache is
overwritten before each call, because inside a model weights come from memory too. Short calls are
timed as one CUDA graph over all copies. Longer calls are timed by events, and the device is held
back until the host has queued the whole call. Stock and peers run under the library settings that
this process started with, ours under `numeric_settings`. On a CPU the host's clock times all calls:
a bench is tried there, and its times say nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
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


class Machine(ColdDevice):
    """The device under test, and what it reaches today: bytes and operations per second."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        if self.cuda:
            super().__init__(device)
        self.device = device
        self.copy_bandwidth, self.matmul_rate = self._measure_ceilings()

    def copies(self, operand_bytes: float) -> int:
        return super().copies(operand_bytes) if self.cuda else 2

    def measure(self, race: Race) -> dict[str, Any]:
        """Time all contestants and give the fields of a row.

        A peer or a stock way that cannot run the shape is named in `unavailable`. An error of ours
        passes through.
        """
        timers: dict[str, Callable[[int], float]] = {}
        peaks: dict[str, int] = {}
        unavailable: dict[str, str] = {}
        for name, contestant in {"ours": race.ours, **race.stock, **race.peers}.items():
            settings = numeric_settings if name == "ours" else library_defaults
            before = taken_bytes(self.device)
            try:
                timers[name] = self._prepared(contestant, race.clock, settings)
                if race.memory:
                    peaks[name] = self._peak(contestant, settings, before)
            except UNAVAILABLE as error:
                if name == "ours":
                    raise
                unavailable[name] = reason(error)
        medians = self._medians(timers)
        ceiling = max(race.moved_bytes / self.copy_bandwidth, race.operations / self.matmul_rate)
        return row_fields(race, medians, peaks, ceiling) | {"unavailable": unavailable}

    def _prepared(
        self, contestant: Contestant, clock: Clock, settings: Context = nullcontext
    ) -> Callable[[int], float]:
        """Warm up, and give the function that times round i in seconds."""
        calls, context, host = contestant.calls, contestant.context, 0.0
        with settings(), context():
            if clock == "graph" and self.cuda:
                return self.timers({"": calls})[""]
            for call in (*calls, *[calls[0]] * contestant.warmups):
                started = finished_seconds(self.device)
                call()
                host = time.perf_counter() - started

        def wall(i: int) -> float:
            with settings(), context():
                started = finished_seconds(self.device)
                calls[i % len(calls)]()
                return finished_seconds(self.device) - started

        def events(i: int) -> float:
            with settings(), context():
                hold = int(min(1.5 * host, LONGEST_HOLD) * SLEEP_CYCLES_PER_SECOND)
                return self.device_seconds(calls[i % len(calls)], hold)

        return events if clock == "events" and self.cuda else wall

    def _medians(self, timers: Mapping[str, Callable[[int], float]]) -> dict[str, float]:
        """Median seconds of each; every round times all of them, each round another one first."""
        samples = interleaved(timers, **ROUNDS)
        if self.cuda and 2 * torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()
        return {name: median(values) for name, values in samples.items()}

    def _peak(self, contestant: Contestant, settings: Context, before: int) -> int:
        """Bytes at the peak of a call beyond those before the contestant's first call, so that
        what it keeps from call to call counts."""
        gc.collect()
        with settings(), contestant.context(), peak_bytes(self.device, before) as peak:
            contestant.calls[0]()
        return peak[0]

    def _measure_ceilings(self) -> tuple[float, float]:
        """Copy bandwidth (read + write), and the rate of a square bf16 product."""
        count, size = (1 << 30, 8192) if self.cuda else (1 << 20, 128)
        source = torch.zeros(count, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(a)
        calls: dict[str, Call] = {
            "copy": lambda: target.copy_(source),
            "multiply": lambda: torch.mm(a, b.t(), out=product),
        }
        timers = {name: self._prepared(Contestant([c]), "events") for name, c in calls.items()}
        seconds = self._medians(timers)
        return 2 * count / seconds["copy"], 2 * size**3 / seconds["multiply"]


def taken_bytes(device: torch.device) -> int:
    """Bytes that are allocated, or that captured graphs keep; 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # graphs that are gone leave their pool to the allocator
    return torch.cuda.memory_allocated(device) + _held_by_graphs()


@contextmanager
def peak_bytes(device: torch.device, before: int | None = None) -> Iterator[list[int]]:
    """The peak inside the block, once it has ended, beyond `before` or what it began with; those of
    captured graphs count. 0 on a CPU."""
    found = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if before is None else before
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found[0] = torch.cuda.max_memory_allocated(device) + _held_by_graphs() - (before or 0)


def _held_by_graphs() -> int:
    """Bytes in the pools of captured graphs that the allocator counts as free."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def row_fields(
    race: Race, seconds: Mapping[str, float], peaks: Mapping[str, int], ceiling_seconds: float
) -> dict[str, Any]:
    """Fields of a row from median seconds by contestant."""
    ours = seconds["ours"]
    stock = min(race.stock.keys() & seconds.keys(), key=lambda n: (seconds[n], n), default=None)
    others = race.peers.keys() | (race.stock.keys() if len(race.stock) > 1 else set())
    rates = {name: race.tokens / s for name, s in seconds.items()} if race.tokens else {}

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {("stock" if name == stock else name): value for name, value in values.items()}

    return (
        {"ours_us": ours * 1e6}
        | ({} if stock is None else against_stock(ours, seconds[stock], stock))
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
