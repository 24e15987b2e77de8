"""A model, an engine, and its generation timed step by step, with the device beneath it.

The engine reports its progress after every step. That gives the time to the first token, the end of
the prefill and the steady state. How long the device waits is measured by events around every
replay of a CUDA graph: between two replays the host, or a copy it asked for, held the device up.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch as attribute

import torch

from benchmarks.models import build_model
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.timing import Machine
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

MAX_BATCH_TOKENS, BLOCK_SIZE = 16384, 16
"""Tokens of one step, and of one cache block, of the engines measured."""


@contextmanager
def patched_model(name: str, device: torch.device) -> Iterator[Any]:
    """A model of the benches under a patch, once the memory of the case before is freed."""
    release_memory()
    model = build_model(name, device)
    with patch(model):
        yield model


def release_memory() -> None:
    """Give back what dropped models, caches and graphs held."""
    gc.collect()
    torch.cuda.empty_cache()


def engine_for(model: Any, workload: Workload, **settings: Any) -> RolloutEngine:
    """An engine with room for the whole workload at a time; `settings` are more of its own."""
    return RolloutEngine(
        model,
        eos_token_id=None,
        kv_block_size=BLOCK_SIZE,
        num_kv_blocks=workload.kv_blocks(BLOCK_SIZE),
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_num_seqs=workload.sequences,
        tokens_per_sequence=workload.prompt_len + workload.longest + TOKENS_BEYOND,
        **settings,
    )


class Tick(NamedTuple):
    """The state after one step: seconds since the start of the generation, tokens generated and
    graph replays begun by then."""

    seconds: float
    tokens: int
    replays: int


def idle_share(replays: Sequence[tuple[Any, Any]]) -> float | None:
    """Share of the time from the first event to the last that no replay covers; None with fewer
    than two replays. Waits for the device."""
    if len(replays) < 2:
        return None
    replays[-1][1].synchronize()
    busy = sum(start.elapsed_time(end) for start, end in replays)
    return 1.0 - busy / replays[0][0].elapsed_time(replays[-1][1])


@contextmanager
def replay_events() -> Iterator[list[tuple[Any, Any]]]:
    """Record an event before and after each `CUDAGraph.replay` inside the block."""
    found: list[tuple[Any, Any]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(graph)
        end.record()
        found.append((start, end))

    with attribute.object(torch.cuda.CUDAGraph, "replay", timed):
        yield found


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of steps: from one tick to another."""

    steps: int
    tokens: int
    seconds: float
    tokens_before: int
    """Tokens generated before the window."""
    idle_share: float | None
    """See the function of this name."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class Generation:
    """One timed `generate`."""

    completions: list[Any]
    seconds: float
    ticks: Sequence[Tick]
    replays: Sequence[tuple[Any, Any]]
    """Events before and after each replay of a CUDA graph."""
    statistics: Any
    """A `RolloutStatistics` of the engine."""

    @property
    def prefill_end(self) -> int:
        """Index of the tick that ends the last step with a prompt in it: the step after it is the
        first to give every sequence a token. RuntimeError where none did."""
        count = len(self.completions)
        for i, (before, after) in enumerate(pairwise(self.ticks)):
            if before.tokens >= count and after.tokens - before.tokens >= count:
                return i
        raise RuntimeError(
            f"no step decoded all {count} sequences: some ended before the last was prefilled; "
            "ask for longer completions or fewer sequences"
        )

    def decoding(self) -> Window:
        """The window from the end of the prefill to the last tick."""
        return self.window(self.prefill_end, len(self.ticks) - 1)

    def steady(self, skip: int) -> Window:
        """The steps that decode every sequence, without the first `skip` and the very last one, in
        which the engine also checks the weights."""
        first, count, ticks = self.prefill_end + skip, len(self.completions), self.ticks
        last = first
        while last + 2 < len(ticks) and ticks[last + 1].tokens - ticks[last].tokens >= count:
            last += 1
        return self.window(first, last)

    def window(self, first: int, last: int) -> Window:
        """The window from tick `first` to tick `last`; RuntimeError where no step lies between."""
        if last <= first:
            raise RuntimeError(f"no steps to measure between ticks {first} and {last}")
        start, end = self.ticks[first], self.ticks[last]
        return Window(
            steps=last - first,
            tokens=end.tokens - start.tokens,
            seconds=end.seconds - start.seconds,
            tokens_before=start.tokens,
            idle_share=idle_share(self.replays[start.replays : end.replays]),
        )


def timed_generation(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    bench: Machine,
    *,
    warm_up: SamplingParams | None = None,
) -> Generation:
    """Generate and take the time; the engine's prefix cache must not know the prompts.

    `warm_up` is sampling to capture all graphs for first. Only replays of graphs that are captured
    in this call are timed.
    """
    ticks: list[Tick] = []
    with replay_events() as replays:
        if warm_up is not None:
            engine.warm_up(warm_up)
        started = finished_seconds(bench.device)

        def tick(tokens: int, finished: int, total: int) -> None:
            ticks.append(Tick(time.perf_counter() - started, tokens, len(replays)))

        completions = engine.generate(prompts, sampling, progress=tick)
        seconds = finished_seconds(bench.device) - started
    return Generation(completions, seconds, ticks, replays, engine.stats)
