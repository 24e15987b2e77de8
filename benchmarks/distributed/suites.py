"""The suites of `python -m benchmarks distributed`, on all GPUs of this machine."""

from __future__ import annotations

import torch

from benchmarks.distributed.grpo import grpo_scaling
from benchmarks.distributed.ordered_sum import sum_round
from benchmarks.distributed.step import optimizer_step
from benchmarks.suite import Suites, cases
from rl_consistency.trainers.strategies.build import STRATEGIES


def distributed_suites() -> Suites:
    """Sums alone, optimizer steps, whole GRPO steps."""
    ranks = {"ranks": max(torch.cuda.device_count(), 2)}
    sums = [{**ranks, "gigabytes": size} for size in (1, 2, 4, 8)]
    trained = [name for name in STRATEGIES if name != "zero1"]  # not in bf16
    steps = [
        {**ranks, "model": model, "strategy": strategy, "sequences": 8, "length": 2048}
        for model in ("qwen3-0.6b", "qwen3-1.7b")
        for strategy in trained
    ]
    work = {**ranks, "model": "qwen3-0.6b", "strategy": "replicated", "groups": 16, "group": 8}
    scaling = [{**work, "new_tokens": tokens} for tokens in (256, 1024)]
    return {
        "distributed_sum": cases("ordered sum", sum_round, sums),
        "distributed_step": cases("optimizer step", optimizer_step, steps),
        "distributed_grpo": cases("GRPO step", grpo_scaling, scaling),
    }
