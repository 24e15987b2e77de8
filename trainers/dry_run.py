"""A recipe tried out: all of it is built and checked, and one small step is taken of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from rl_consistency.trainers.algorithms.rollout_engine import cache_bytes_of
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.memory import activations, available_bytes, memory_told, resident

MOST_TOKENS = 16
"""Most tokens of a completion."""


def rehearse(run: Any, announce: Callable[[str], None]) -> dict[str, Any]:
    """Take one small step with the parts of a run, and tell what was seen; the step's metrics.

    Its files lie in a temporary folder and go with it. The run is of no use afterwards.
    """
    with TemporaryDirectory(prefix="rl_consistency-dry-run-") as directory:
        recipe = run.config
        run.config, run.directory = reduced(recipe, Path(directory)), Path(directory)
        run.no_signal.warned = True  # of two samples that is no news
        run.begin(overwrite=False)
        kv_cache = cache_bytes_of(recipe, run.model)  # by what is free where a run allocates it
        run.progress.starts("taking a small step")
        metrics = run.step(1)
    parts, available = resident(run, kv_cache), available_bytes(run.model.device)
    if available is not None:
        parts |= activations(run, recipe)
    told = [*_told(run, metrics), *memory_told(parts, available)]
    run.progress.starts("")
    for line in [*told, "A dry run writes no run directory and saves no weights."]:
        announce(line)
    return metrics


def reduced(config: RunConfig, directory: Path) -> RunConfig:
    """The recipe with one step, as few prompts as its other settings allow, short completions, and
    its files in `directory`."""
    most = min(config.sampling.max_tokens, MOST_TOKENS)
    changes: dict[str, dict[str, Any]] = {
        "run": {"output_dir": directory},
        "warm_start": {"steps": min(config.warm_start.steps, 1)},
        "rollout": {"sampling": replace(config.rollout.sampling, max_tokens=most)},
        "algorithm": {
            "epochs_per_rollout": 1,
            "overlong_buffer": min(config.algorithm.overlong_buffer, most),
        },
        "optimizer": {"warmup_steps": 0},
        "training": {"steps": 1, "eval_samples": 1},
    }
    for prompts in range(1, config.rollout.prompts_per_step):
        changes["rollout"]["prompts_per_step"] = prompts
        try:
            return _changed(config, changes)
        except ValidationError:
            continue  # the batch is cut into updates and leaves
    changes["rollout"]["prompts_per_step"] = config.rollout.prompts_per_step
    return _changed(config, changes)


def _changed(config: RunConfig, changes: dict[str, dict[str, Any]]) -> RunConfig:
    tree = {name: getattr(config, name) for name in RunConfig.model_fields}
    for name, values in changes.items():
        section = tree[name]
        fields = {key: getattr(section, key) for key in type(section).model_fields}
        tree[name] = type(section).model_validate(fields | values)
    return RunConfig.model_validate(tree)


def _told(run: Any, metrics: dict[str, Any]) -> list[str]:
    config: RunConfig = run.config
    longest = max(map(len, run.train_set.prompts))
    evaluated = 0 if run.eval_set is None else len(run.eval_set.prompts)
    rewards = [f"{term.name} {metrics[f'reward/{term.name}']:.4g}" for term in run.rewards]
    samples = config.rollout.prompts_per_step * config.sampling.n
    differing = metrics["consistency/mismatched_tokens"]
    return [
        f"data      {len(run.train_set.prompts)} prompts, the longest {longest} tokens; "
        f"{evaluated} for evaluation",
        f"a step    {samples} completions of at most {config.sampling.max_tokens} tokens: rollout "
        f"{metrics['time/rollout_seconds']:.1f} s, training "
        f"{metrics['time/training_seconds']:.1f} s",
        f"tokens    {differing} of {metrics['consistency/tokens']} differ",
        f"rewards   {', '.join(rewards)}",
    ]
