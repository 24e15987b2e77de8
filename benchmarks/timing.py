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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from triton.errors import TritonError

from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.numerics.settings import numeric_settings, read_settings, write_settings
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

LIBRARY_DEFAULTS = read_settings()
"""The settings of a process that has not set any: read when this module is imported."""

ROUNDS = {"seconds": 0.12, "least": 7, "most": 60}
"""All rounds of a case take about so many seconds, where `least` and `most` allow it."""


def reason(error: BaseException) -> str:
    """Why a way is unavailable, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextmanager
def library_defaults() -> Iterator[None]:
    """Process-wide numeric settings as torch ships them, inside the block."""
    before = read_settings()
    write_settings(LIBRARY_DEFAULTS)
    try:
        yield
    finally:
        write_settings(before)


class Contestant(NamedTuple):
    """One way to do the work."""

    calls: Sequence[Call]
    """The work on each copy of its operands."""
    context: Context = nullcontext
    """Entered around every call, outside what is timed."""
    warmups: int = 1
    """Calls on the first copy, after one on each, before anything is timed."""


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

    def measure(
        self, *, ours: Contestant, stock: Mapping[str, Contestant],
        peers: Mapping[str, Contestant] | None = None, clock: Clock = "events",
        moved_bytes: float = 0.0, operations: float = 0.0, tokens: int = 0, memory: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Time all contestants and give the fields of a row.

        Args:
            stock: what comes with torch or Hugging Face; the fastest counts.
            moved_bytes, operations: what has to be read and written once, and multiplications and
                additions on the matrix units.
            tokens: tokens of a call, for tokens per second.
            memory: whether the peak memory of one call is measured.

        A peer or a stock way that cannot run the shape is named in `unavailable`. An error of ours
        passes through.
        """
        timers: dict[str, Callable[[int], float]] = {}
        peaks: dict[str, int] = {}
        unavailable: dict[str, str] = {}
        for name, contestant in {"ours": ours, **stock, **(peers or {})}.items():
            settings = numeric_settings if name == "ours" else library_defaults
            # What a contestant keeps from call to call counts.
            before = taken_bytes(self.device)
            try:
                timers[name] = self._prepared(contestant, clock, settings)
                if memory:
                    gc.collect()
                    with settings(), contestant.context(), peak_bytes(self.device, before) as peak:
                        contestant.calls[0]()
                    peaks[name] = peak[0]
            except UNAVAILABLE as error:
                if name == "ours":
                    raise
                unavailable[name] = reason(error)
        ceiling = max(moved_bytes / self.copy_bandwidth, operations / self.matmul_rate)
        fields = row_fields(self._medians(timers), stock, ceiling, tokens)
        return fields | {"peak_bytes": peaks, "unavailable": unavailable}

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
        hold = int(min(1.5 * host, LONGEST_HOLD) * SLEEP_CYCLES_PER_SECOND)

        def timed(i: int) -> float:
            call = calls[i % len(calls)]
            with settings(), context():
                if clock == "events" and self.cuda:
                    return self.device_seconds(call, hold)
                started = finished_seconds(self.device)
                call()
                return finished_seconds(self.device) - started

        return timed

    def _medians(self, timers: Mapping[str, Callable[[int], float]]) -> dict[str, float]:
        """Median seconds of each; every round times all of them, each round another one first."""
        samples = interleaved(timers, **ROUNDS)
        if self.cuda and 2 * torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()
        return {name: median(values) for name, values in samples.items()}

    def _measure_ceilings(self) -> tuple[float, float]:
        """Copy bandwidth (read + write), and the rate of a square bf16 product."""
        count, size = (1 << 30, 8192) if self.cuda else (1 << 20, 128)
        source = torch.zeros(count, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(a)
        copy = Contestant([lambda: target.copy_(source)])
        multiply = Contestant([lambda: torch.mm(a, b.t(), out=product)])
        seconds = self._medians(
            {"copy": self._prepared(copy, "events"), "multiply": self._prepared(multiply, "events")}
        )
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
    seconds: Mapping[str, float], stock: Iterable[str], ceiling: float = 0.0, tokens: int = 0
) -> dict[str, Any]:
    """Fields of a row from the seconds of `ours` and of others, of which those of `stock` that ran
    are set against it, and the least seconds that the work can take."""
    ours = seconds["ours"]
    best = min(set(stock) & seconds.keys(), key=lambda name: (seconds[name], name), default=None)
    fields: dict[str, Any] = {} if best is None else {"stock": best}
    if best is not None:
        fields |= {"stock_us": seconds[best] * 1e6, "ratio": seconds[best] / ours}
    return fields | {
        "ours_us": ours * 1e6,
        "peers": {name: s * 1e6 for name, s in seconds.items() if name not in ("ours", best)},
        "ceiling_fraction": ceiling / ours if ceiling else None,
        "tokens_per_second": {name: tokens / s for name, s in seconds.items()} if tokens else {},
    }
