"""Does it matter for learning? `python -m benchmarks.study.runs FOLDER --model DIRECTORY`.

Trains every arm in every setting with every seed, one run after another, each in its own directory
of FOLDER, whose `metrics.jsonl` gets a line a step. Processes that are given the same FOLDER share
the work, and the arms of a seed come side by side. SIGTERM ends a process after its step and a
checkpoint, which the next call continues; runs that have ended are not run again.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.study.arms import ARMS
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.trainers import run
from rl_consistency.trainers.config.recipe import RunConfig, find_recipe, load_config

RECIPE = "grpo_sums_smollm2_135m_h200"
UNSAFE = [
    "optimizer.learning_rate=1e-4",
    "optimizer.max_grad_norm=null",
    "algorithm.clip_low=0.999999",
    "algorithm.clip_high=1e6",
    "algorithm.updates_per_rollout=4",
]
SLOWER = [*UNSAFE, "optimizer.learning_rate=3e-5"]
HARD = [
    "data.task.max_value=99",
    r'data.prompt_template="12 + 35 = 47\n39 + 84 = 123\n{prompt}"',
]
SETTINGS: Mapping[str, Sequence[str]] = {
    "safe": [],
    "unsafe": UNSAFE,
    "unsafe-slower": SLOWER,
    "unsafe-hard": [*SLOWER, *HARD],
}
"""What a setting changes in the recipe. Unsafe: ten times the learning rate, four updates a
rollout, and neither ratios nor gradients are clipped. Slower: three times the rate. Hard: the same
with terms up to 99, of which the model knows fewer sums: its tokens stay uncertain for longer."""

COMMON = [
    "rollout.prompts_per_step=16",
    "training.eval_every=25",
    "training.save_every=null",
    "consistency.gradient_check_every=0",
    "consistency.shadow_every=0",
    "tracking.console=false",
]
"""In all settings: half the recipe's prompts a step, and nothing beside training is measured."""

FAILED = "failed.txt"
"""Why a run ended that cannot go on, in its directory."""


def name_of(setting: str, arm: str, seed: int) -> str:
    """The directory of a run."""
    return f"{setting}_{arm}_{seed}"


def config_of(
    folder: Path, setting: str, arm: str, seed: int, *, recipe: str, given: Sequence[str]
) -> RunConfig:
    """The recipe of a run; `given` are more `--set`s."""
    own = [
        f"run.output_dir={folder / name_of(setting, arm, seed)}",
        f"run.seed={seed}",
        f"consistency.on_drift={'raise' if arm == 'exact' else 'record'}",
    ]
    return load_config(find_recipe(recipe), [*COMMON, *SETTINGS[setting], *own, *given])


def train(config: RunConfig, arm: str) -> None:
    """Begin or continue a run. What ends one for good, as a gradient that is not finite does, is
    kept in its directory."""
    directory = config.run.output_dir
    resume = any((directory / "checkpoints").glob("step_*"))
    try:
        with patch.object(run, "GRPOTrainer", ARMS[arm]):
            run.train(config, resume=resume, overwrite=not resume, announce=lambda line: None)
    except (ValueError, ConsistencyError) as error:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FAILED).write_text(f"{type(error).__name__}: {error}\n", "utf-8")


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether no other process holds the file; it is held inside the block."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the folder lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--model", type=Path, help="instead of the recipe's policy")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["safe", "unsafe"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[17, 18, 19])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], help="as of rl-consistency train")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    given = [f"training.steps={args.steps}", *args.set]
    given += [f"policy.path={args.model}"] if args.model else []
    for seed, setting, arm in itertools.product(args.seeds, args.settings, args.arms):
        place = args.folder / name_of(setting, arm, seed)
        with claimed(place.with_suffix(".lock")) as ours:
            if not ours or any((place / name).exists() for name in ("summary.json", FAILED)):
                continue
            print(f"{place.name} begins", flush=True)
            train(config_of(args.folder, setting, arm, seed, recipe=args.recipe, given=given), arm)
            print(f"{place.name} has ended", flush=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
