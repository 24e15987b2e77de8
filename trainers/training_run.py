"""A recipe trained from Python: in a notebook or a script, with functions as rewards."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_consistency.trainers import run
from rl_consistency.trainers.config.recipe import RunConfig, checked, find_recipe, recipe_tree
from rl_consistency.trainers.config.strict_yaml import merge
from rl_consistency.trainers.launch import leave
from rl_consistency.trainers.run_directory.directory import METRICS
from rl_consistency.trainers.run_directory.step_files import read_metrics

Reward = Callable[..., Any] | str | Mapping[str, Any]
"""A function; a name as in a recipe; or a term of `reward.functions`, with a `function` or name."""


@dataclass(frozen=True, repr=False)
class TrainingRun:
    """What a run left."""

    run_dir: Path
    """Its directory: checkpoints, metrics, config."""
    summary: dict[str, Any]
    """What stands in `summary.json`; of a dry run the metrics of its step."""
    metrics: list[dict[str, Any]]
    """A row for each step, as `metrics.jsonl` has them; [] of a dry run."""

    @property
    def drift(self) -> dict[str, Any]:
        """Training against rollout over the run: tokens, mismatched_tokens, ... of docs/metrics.md,
        without the prefix consistency/."""
        prefix = "consistency/"
        named = {k: v for k, v in self.summary.items() if k.startswith(prefix)}
        return {key.removeprefix(prefix): value for key, value in named.items()}

    def __repr__(self) -> str:
        found = self.drift
        told = f"{found.get('mismatched_tokens')} of {found.get('tokens')} tokens differ"
        return f"TrainingRun({str(self.run_dir)!r}, {told})"


def train(
    recipe: str | Path | Mapping[str, Any] | RunConfig,
    *,
    rewards: Sequence[Reward] | Reward | None = None,
    set: Sequence[str] | str = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    announce: Callable[[str], None] = print,
    **overrides: Any,
) -> TrainingRun:
    """Train a recipe to its end: a file, the name of one that comes with the package, or its
    sections as a dict.

    `rewards` take the place of `reward.functions`. A function is one of `signature: ours`, called
    with one completion at a time where it has an argument `completion` and none `completions`; its
    name is its `__name__`. A run of functions is resumed with functions of the same names and
    source; what they call and hold is not compared.

    Further arguments override values: `training={"steps": 3}`, `training__steps=3`; `set` has the
    texts of `--set`, such as "training.steps=3", and comes last. `resume`, `overwrite`, `dry_run`
    are the options of `rl-consistency train`. `announce` is told what goes on, line by line.

    Mistakes raise: ConfigError and other ValueErrors, TypeError, ConsistencyError on drift. Several
    runs may follow one another in a process. A signal ends a run after its step where the call is
    in the main thread. No report is drawn: `rl-consistency report RUN_DIR` does.
    """
    tree, source, folder = _tree(recipe)
    for key, value in overrides.items():
        merge(tree, key.replace("__", ".").split("."), value)
    functions: dict[str, Callable[..., Any]] = {}
    if rewards is not None:
        listed = [rewards] if callable(rewards) or isinstance(rewards, str | Mapping) else rewards
        merge(tree, ["reward", "functions"], [_term(reward, functions) for reward in listed])
    config = checked(tree, source, folder, functions, [set] if isinstance(set, str) else set)
    grouped = dist.is_initialized()
    try:
        summary = run.train(
            config,
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            announce=announce,
            rewards=functions,
        )
    finally:
        if not grouped and dist.is_initialized():
            # Processes of a launcher may take another run together; one alone makes a new group.
            atexit.register(leave) if dist.get_world_size() > 1 else leave()
    file = config.run.output_dir / METRICS
    rows = read_metrics(file) if file.is_file() and not dry_run else []
    return TrainingRun(config.run.output_dir, summary, rows)


def _tree(recipe: Any) -> tuple[dict[str, Any], str, Path]:
    """The sections of a recipe, what errors call it, and the folder its files are relative to."""
    if isinstance(recipe, RunConfig):
        return recipe.model_dump(mode="json"), "the recipe", Path()
    if isinstance(recipe, Mapping):
        return copy.deepcopy(dict(recipe)), "the recipe", Path()
    if not isinstance(recipe, str | Path):
        raise TypeError(f"recipe must be a path, a name or a dict, got {type(recipe).__name__}")
    file = find_recipe(str(recipe))
    return recipe_tree(file), str(file), file.parent


def _term(reward: Any, functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """The term of a recipe for one of `rewards`; a function is put into `functions` by its name."""
    term = {"name": reward} if isinstance(reward, str) else reward
    term = dict(term) if isinstance(term, Mapping) else {"function": term}
    if "function" not in term:
        return term
    function = term.pop("function")
    if not callable(function):
        raise TypeError(f"rewards: a function or a name is needed, got {function!r:.60}")
    plain = getattr(function, "func", function)  # of functools.partial
    name = term.setdefault("name", getattr(plain, "__name__", type(plain).__name__).strip("<>"))
    if name in functions:
        raise ValueError(f"rewards: two functions are named {name}: give one another __name__")
    functions[name] = function
    return term
