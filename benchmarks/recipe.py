"""GRPO steps of our own trainer on random prompts, and what its metrics say of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.make_random_model import main as make_random_model
from benchmarks.rollout.workload import Workload
from benchmarks.timing import Machine, row_fields
from rl_consistency.numerics.files import write_whole
from rl_consistency.numerics.strict import strict
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train

STEPS, WARM_UP = 5, 2
"""Steps of a run, and how many of them do not count: they capture graphs and compile kernels."""
PHASES = ("step", "rollout", "training", "digest")


def random_prompts(count: int, length: int) -> list[dict[str, str]]:
    """Texts of one token per character, so many tokens long."""
    draw, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz "
    return [{"prompt": "".join(draw.choices(letters, k=length))} for _ in range(count)]


def variety(completions: list[str], **columns: Any) -> list[float | None]:
    """The share of characters that are not there before, as TRL calls a reward. Random weights do
    not meet it equally."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


def recipe_steps(
    place: str, device: str, workload: Workload, *, micro_batch: int = 16, name: str = "run",
    gradient_leaves: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """Metrics of the steps behind the warm-up, on `place`/model; of rank 0 alone, others get
    none."""
    folder = Path(place)
    rows = random_prompts(STEPS * workload.groups, workload.prompt_len)
    data = folder / f"prompts{len(rows)}.jsonl"  # which every rank writes
    write_whole(data, "\n".join(json.dumps(row | {"answer": "none"}) for row in rows))
    tree = {
        "run": {"name": name, "device": device, "output_dir": str(folder / name)},
        "policy": {"path": f"{place}/model", "dtype": "bfloat16"},
        "tokenizer": {"kind": "auto"},
        "data": {
            "path": str(data),
            "prompt_field": "prompt",
            "max_prompt_tokens": workload.prompt_len,
        },
        "reward": {"functions": [{"name": "benchmarks.recipe:variety", "signature": "trl"}]},
        "rollout": {
            "prompts_per_step": workload.groups,
            "sampling": {"n": workload.group_size, "max_tokens": workload.longest},
            "max_batch_tokens": 16384,
        },
        "optimizer": {"learning_rate": 1e-6},
        "training": {"steps": STEPS, "micro_batch_size": micro_batch},
        "consistency": {"gradient_leaves": gradient_leaves, "on_drift": "record"},
        "tracking": {"console": False},
    }
    train(RunConfig.model_validate(tree), announce=lambda line: None)
    file = folder / name / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    found = [row for row in map(json.loads, lines) if "time/step_seconds" in row]
    return found[WARM_UP:]


def phase_medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase that every step has; of no steps nothing."""
    names = {phase: f"time/{phase}_seconds" for phase in PHASES}
    held = set.intersection(*map(set, rows)) if rows else ()
    return {p: median(row[name] for row in rows) for p, name in names.items() if name in held}


def grpo_step(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """Time of a step with stock ops over that with canonical ones, and whose tokens drift.

    Stock is the same trainer and engine with every op on its stock path.
    """
    seconds: dict[str, float] = {}
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as place:
        make_random_model(["--preset", name, f"{place}/model"])
        for mode in ("strict", "stock"):
            with strict(mode == "strict"):
                rows = recipe_steps(place, bench.device.type, workload, name=mode)
            medians = phase_medians(rows)
            seconds[mode] = medians["step"]
            figures |= {f"{mode}/{phase}_seconds": value for phase, value in medians.items()}
            for count in ("tokens", "mismatched_tokens"):
                figures[f"{mode}/{count}"] = sum(row[f"consistency/{count}"] for row in rows)
    name, tokens = "the same trainer with stock ops", workload.sequences * workload.longest
    times = {"ours": seconds["strict"], name: seconds["stock"]}
    return row_fields(times, [name], tokens=tokens) | {"figures": figures}
