"""Device times of calls on a GPU, as cold as inside a model: several copies of the operands, which
together exceed the cache, in one CUDA graph; and rounds that alternate between contestants."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_consistency.cases.launches import UNABLE, does_not_compile
from rl_consistency.kernels.core.compile_ahead import compile_ahead

Call = Callable[[], object]
Timer = Callable[[int], float]
"""Times round i, in seconds."""

COPIES_LIMIT = 80
FLUSH_BYTES = 256 << 20


class ColdDevice:
    """A CUDA device whose cache holds nothing of a call's operands when the call begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        # One stream for all captures: a pool gives memory back to the stream that freed it only.
        self._stream = torch.cuda.Stream(device)

    def copies(self, operand_bytes: float) -> int:
        """How many copies of operands exceed the cache twice over."""
        return max(1, min(-int(-2 * self.cache_bytes // operand_bytes), COPIES_LIMIT))

    def free_bytes(self) -> float:
        """Memory that torch can still take."""
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return float(free + held)

    def prepare(self, calls: Sequence[Call]) -> None:
        """Compile what the calls launch, side by side. What does not compile says so again when it
        is called."""
        try:
            compile_ahead(calls)
        except UNABLE as error:
            if not does_not_compile(error):
                raise

    def timers(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, Timer]:
        """Warm up, and give for each name what times one call in a graph of all of its calls."""
        # No result is read, so all graphs share one pool. It lives as long as one of them.
        pool, found = torch.cuda.graph_pool_handle(), {}
        for name, own in calls.items():
            for call in (*own, own[0]):
                call()
            replay, count = self._captured(own, pool).replay, len(own)
            found[name] = lambda _, replay=replay, n=count: self.device_seconds(replay) / n
        return found

    def _captured(self, calls: Sequence[Call], pool: Any) -> torch.cuda.CUDAGraph:
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which gives the allocator's memory back at each capture.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool, "thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        here.wait_stream(self._stream)
        return graph

    def device_seconds(self, call: Call, hold: int = 0) -> float:
        """A call on the device, which is held back for `hold` cycles while the host queues it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        if hold:
            torch.cuda._sleep(hold)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def interleaved(
    timers: Mapping[str, Timer], *, seconds: float, least: int, most: int
) -> dict[str, list[float]]:
    """Samples of each: rounds for about `seconds`, `least` to `most`. Every round times all of
    them, each round another one first."""
    started = time.perf_counter()
    samples = {name: [timer(0)] for name, timer in timers.items()}
    spent = max(time.perf_counter() - started, 1e-6)
    rounds = max(least, min(int(seconds / spent), most))
    names = list(timers)
    for i in range(1, rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(timers[name](i))
    return samples
