"""An optimizer step on several GPUs: ordered sums against the same strategy's stock ones.

Both have their own policy with the same random weights. A step is one leaf of 16k tokens a GPU,
forward, backward, sum, and AdamW; the two take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from benchmarks.distributed.ranks import on_ranks
from benchmarks.timing import Machine, held_by_graphs
from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.build import STRATEGIES
from rl_consistency.trainers.strategies.strategy import Strategy
from rl_consistency.verify.presets import build_preset

ROUNDS, WARM_UP = 11, 3


def optimizer_step(
    bench: Machine, ranks: int, model: str, strategy: str, sequences: int, length: int
) -> dict[str, Any]:
    """Times of a step and peaks of memory, of the slowest and the fullest rank.

    `sequences` of `length` tokens are a leaf.
    """
    found = on_ranks(bench, ranks, _measured, model, strategy, sequences, length)
    ours, stock = (found[ordered]["seconds"] for ordered in (True, False))
    tokens = ranks * sequences * length
    carry = found["carry_bytes"]
    peaks = {name: found[kind]["bytes"] for name, kind in (("ours", True), ("stock", False))}
    return {
        "ours_us": ours * 1e6,
        "stock_us": stock * 1e6,
        "stock": f"{strategy} with NCCL's sums of fp32 gradients",
        "ratio": stock / ours,
        "peak_bytes": peaks,
        "tokens_per_second": {"ours": tokens / ours, "stock": tokens / stock},
        "figures": {
            "times_stock": ours / stock,
            "carry_bytes": carry,
            "memory_times_stock": (peaks["ours"] - carry) / max(peaks["stock"], 1),
        },
    }


def _measured(
    world: World, model: str, strategy: str, sequences: int, length: int
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    with ExitStack() as stack:
        runs: dict[bool, Callable[[], None]] = {}
        for ordered in (True, False):
            policy: Any = build_preset(model, torch.bfloat16, device=world.device).train()
            stack.enter_context(patch(policy, grad_dtype=torch.float32))
            order = PartOrder(world.size)
            ranks = STRATEGIES[strategy](world, order, policy, ordered=ordered)
            runs[ordered] = _step_of(ranks, [length] * sequences)
            found[ordered] = {"times": [], "bytes": 0}
        for turn in range(ROUNDS + WARM_UP):
            for ordered, run in runs.items():
                seconds, peak = _timed(world, run)
                if turn >= WARM_UP:
                    found[ordered]["times"].append(seconds)
                    found[ordered]["bytes"] = max(found[ordered]["bytes"], peak)
    for ordered in runs:
        times, peak = median(found[ordered].pop("times")), found[ordered]["bytes"]
        each = world.gather("figures", (times, peak))
        found[ordered] = {"seconds": max(t for t, _ in each), "bytes": max(p for _, p in each)}
    return found | {"carry_bytes": 4 * sum(ranks.numels.values()) // world.size}


def _timed(world: World, run: Callable[[], None]) -> tuple[float, int]:
    """Seconds of a step, and bytes allocated on a GPU at its peak beyond those before it."""
    dist.barrier()
    start, before = finished_seconds(world.device), 0
    if cuda := world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
    run()
    seconds = finished_seconds(world.device) - start
    if not cuda:
        return seconds, 0
    return seconds, torch.cuda.max_memory_allocated(world.device) + held_by_graphs() - before


def _step_of(ranks: Strategy, lens: list[int]) -> Callable[[], None]:
    """A step of random tokens, one leaf for each rank."""
    world, section = ranks.world, OptimizerSection(learning_rate=1e-6)
    accelerator = Accelerator(cpu=world.device.type == "cpu")
    optimizer = PolicyOptimizer(ranks, section, accelerator, total_steps=100)
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(0, ranks.policy.config.vocab_size, (sum(lens),), generator=generator)  # pyright: ignore
    batch, count = PackedBatch.from_tokens(ids.to(world.device), lens), world.size * len(lens)

    def backward(part: range, is_filler: bool) -> None:
        scored = token_logprobs(ranks.model, batch, prompt_lengths=[1] * len(lens))
        ranks.backward(-scored.logprobs.mean() / world.size)

    def run() -> None:
        optimizer.step(ranks.accumulate(count, None, backward))

    return run
