"""A round of the ordered sum, all-to-all and addition, against NCCL's fp32 reduce-scatter."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed.ranks import on_ranks
from benchmarks.timing import Machine
from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.numerics.clock import finished_seconds

REPEATS, WARM_UP, BUCKET_BYTES = 7, 2, 256 << 20


def sum_round(bench: Machine, ranks: int, gigabytes: int) -> dict[str, Any]:
    """Times of both for a gradient of this size, the slowest rank's, medians of turns."""
    ours, stock = on_ranks(bench, ranks, _times, gigabytes << 30)
    names = ("ours_us", "stock_us", "ratio")
    fields = dict(zip(names, (ours, stock, stock / ours), strict=True))
    return {**fields, "stock": "NCCL reduce-scatter, fp32"}


def _times(world: World, size: int) -> tuple[float, float]:
    total = OrderedSum(world, PartOrder(world.size))
    buckets, numel = size // BUCKET_BYTES, BUCKET_BYTES // 4
    vectors = [torch.ones(numel, device=world.device) for _ in range(buckets)]
    outs = [vector.new_empty(len(vector) // world.size) for vector in vectors]

    def ours() -> None:
        for _ in total.step():
            for index, vector in enumerate(vectors):
                total.add(str(index), vector)
        for index in range(buckets):
            total.take(str(index))

    def stock() -> None:
        for out, vector in zip(outs, vectors, strict=True):
            dist.reduce_scatter_tensor(out, vector)

    found: list[list[float]] = [[], []]
    for turn in range(REPEATS + WARM_UP):
        for run, times in zip((ours, stock), found, strict=True):
            dist.barrier()
            start = finished_seconds(world.device)
            run()
            seconds = finished_seconds(world.device) - start
            if turn >= WARM_UP:
                times.append(seconds * 1e6)
    each = world.gather("times", [median(times) for times in found])
    return max(t[0] for t in each), max(t[1] for t in each)
