"""Whole GRPO steps on one and on several GPUs, with as much work for each."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.distributed.ranks import on_ranks
from benchmarks.make_random_model import main as make_random_model
from benchmarks.timing import Machine
from rl_consistency.distributed.world import World
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train

STEPS, WARM_UP = 8, 2
RATE = "tokens_per_second"
TIMES = tuple(f"time/{name}_seconds" for name in ("step", "rollout", "training", "digest"))


def grpo_scaling(
    bench: Machine, ranks: int, model: str, strategy: str, groups: int, group: int, new_tokens: int
) -> dict[str, Any]:
    """Tokens a second of all GPUs together, median of steps; `scaling` is over those of one. Where
    the time of a step goes is in the figures.

    Each GPU has `groups` prompts with `group` completions of up to `new_tokens` tokens.
    """
    with TemporaryDirectory() as place:
        make_random_model(["--preset", model, f"{place}/model"])
        work = (place, strategy, groups, group, new_tokens)
        found = {n: on_ranks(bench, n, _medians, *work) for n in (1, ranks)}
    rates = {n: medians.pop(RATE) for n, medians in found.items()}
    figures: dict[str, Any] = {"scaling": rates[ranks] / rates[1]}
    for n, medians in found.items():
        figures |= {f"{name.removeprefix('time/')} on {n}": s for name, s in medians.items()}
    return {
        "figures": figures,
        "tokens_per_second": {f"on {n}": rate for n, rate in rates.items()},
    }


def _medians(
    world: World, place: str, strategy: str, groups: int, group: int, new_tokens: int
) -> dict[str, float]:
    directory = Path(place) / f"run {world.size}"
    tree = {
        "run": {"name": "scaling", "device": world.device.type, "output_dir": str(directory)},
        "policy": {"path": f"{place}/model", "dtype": "bfloat16"},
        "tokenizer": {"kind": "auto"},
        "data": {"task": {"name": "arithmetic", "num_terms": 3, "train_size": 4096}},
        "reward": {"functions": [{"name": "arithmetic"}]},
        "rollout": {
            "prompts_per_step": groups * world.size,
            "sampling": {"n": group, "max_tokens": new_tokens},
            "max_batch_tokens": 16384,
        },
        "optimizer": {"learning_rate": 1e-6},
        "training": {
            "steps": STEPS,
            "micro_batch_size": min(32, groups * group),
            "strategy": strategy,
        },
        "consistency": {"gradient_leaves": world.size},
        "tracking": {"console": False},
    }
    train(RunConfig.model_validate(tree), announce=lambda line: None)
    lines = (directory / "metrics.jsonl").read_text("utf-8").splitlines() if not world.rank else []
    rows = [json.loads(line) for line in lines]
    counted = [row for row in rows if RATE in row][WARM_UP:]
    medians = {n: median(row[n] for row in counted) for n in (RATE, *TIMES)} if counted else {}
    return world.gather("medians", medians)[0]
