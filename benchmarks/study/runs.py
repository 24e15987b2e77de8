"""Does it matter for learning? `python -m benchmarks.study.runs FILE [--jobs N] [--seeds N]`.

The same recipe with canonical ops and with stock ones, for a small dense policy and a small mixture
of experts, at a learning rate that is safe and at one that is not, some seeds of each; on a CPU.
Runs of one seed begin with the same random weights; the warm start runs with the ops of the mode.
FILE is written after each run, and runs that it holds are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from rl_consistency.numerics.files import write_whole

RECIPE = Path(__file__).with_name("recipe.yaml")
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "sparse": {
        "architecture": "qwen3_moe",
        "intermediate_size": 48,
        "experts": {"count": 16, "per_token": 4},
    },
}
"""Policies by name: what each changes in `policy.build`. A token meets as many weights in both."""

MODES = {"canonical": "1", "stock": "0"}
"""Modes by name: the value of RL_CONSISTENCY_STRICT."""

LEARNING_RATES = (3e-4, 1e-3)
LAST = 10
"""Steps at the end of a run over which its reward is averaged."""

SERIES = {
    "reward": "reward/mean",
    "kl": "policy/kl/rollout",
    "gradient_norm": "gradient_norm",
    "clip_fraction": "policy/clip_fraction",
    "mismatch": "consistency/mismatch_fraction",
    "difference": "consistency/logprob_abs_diff/max",
    "rerouted": "consistency/rerouted_tokens",
    "tokens": "consistency/tokens",
    "evaluation": "eval/reward",
}
"""What is kept of a step: name here -> metric."""


def key_of(policy: str, mode: str, rate: float, seed: int) -> str:
    """The name of a run."""
    return f"{policy} {mode} {rate:g} seed {seed}"


def run_of(policy: str, mode: str, rate: float, seed: int, steps: int | None) -> dict[str, Any]:
    """Train once in a process of its own; the series of its steps."""
    recipe = yaml.safe_load(RECIPE.read_text("utf-8"))
    recipe["policy"]["build"] |= POLICIES[policy]
    recipe["optimizer"]["learning_rate"] = rate
    recipe["run"]["seed"] = seed
    if steps is not None:
        recipe["training"]["steps"] = steps
    with TemporaryDirectory() as folder:
        file, output = Path(folder, "recipe.yaml"), Path(folder, "run")
        file.write_text(yaml.safe_dump(recipe), "utf-8")
        command = [sys.executable, "-m", "rl_consistency", "train", str(file)]
        environment = os.environ | {"RL_CONSISTENCY_STRICT": MODES[mode]}
        done = subprocess.run(
            [*command, "--set", f"run.output_dir={output}"],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        # A run that recorded drift ends with status 1.
        if done.returncode not in (0, 1) or not (output / "summary.json").exists():
            raise RuntimeError(f"{key_of(policy, mode, rate, seed)}: {done.stderr[-2000:]}")
        lines = (output / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {name: [row.get(metric) for row in rows] for name, metric in SERIES.items()}


def figures(run: Mapping[str, list[Any]]) -> dict[str, float]:
    """What the tables say of a run."""

    def known(name: str) -> list[float]:
        return [value for value in run[name] if value is not None]

    evaluated = known("evaluation")
    tokens = sum(known("tokens"))
    return {
        "reward": fmean(known("reward")[-LAST:]),
        "best_reward": max(known("reward")),
        "evaluation": evaluated[-1],
        "kl": fmean(known("kl")),
        "gradient_norm": max(known("gradient_norm")),
        "clip_fraction": fmean(known("clip_fraction")),
        "mismatch": fmean(known("mismatch")),
        "difference": max(known("difference")),
        "rerouted": sum(known("rerouted")) / tokens if tokens else 0.0,
        "collapsed": float(fmean(known("reward")[-LAST:]) < max(known("reward")) / 2),
    }


def main() -> int:
    """Run what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    args = parser.parse_args()
    runs: dict[str, Any] = json.loads(args.file.read_text("utf-8")) if args.file.exists() else {}
    wanted = product(range(1, args.seeds + 1), LEARNING_RATES, POLICIES, MODES)
    missing = {
        key: (policy, mode, rate, seed)
        for seed, rate, policy, mode in wanted
        if (key := key_of(policy, mode, rate, seed)) not in runs
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        made = {pool.submit(run_of, *what, args.steps): key for key, what in missing.items()}
        for done, future in enumerate(as_completed(made), 1):
            runs[made[future]] = future.result()
            write_whole(args.file, json.dumps(dict(sorted(runs.items()))) + "\n")
            reward = figures(runs[made[future]])["reward"]
            print(f"{done}/{len(made)} {made[future]}: reward {reward:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
