"""The summary of a run: what its metrics say as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rl_consistency.numerics.files import write_whole
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.numerics.strict import current
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run_directory.step_files import plain

SUMMARY_STEPS = 5
"""Most steps at either end of a run whose mean reward the summary shows; never one at both."""


def summary_of(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of all steps' metrics: rewards at both ends, median speeds; `totals` of the hook."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    ends = min(SUMMARY_STEPS, max(len(rewards) // 2, 1))
    evaluations = [row["eval/reward"] for row in rows if "eval/reward" in row] or [None]
    speeds = {}
    for path in ("rollout", "training", "stock_rollout", "stock_training"):
        name = f"time/{path}_tokens_per_second"
        if values := [row[name] for row in rows if name in row]:
            # The first measurement compiles kernels.
            speeds[name] = round(median(values[1:] or values), 1)
    return {
        "reward/first": fmean(rewards[:ends]),
        "reward/last": fmean(rewards[-ends:]),
        "eval/first": evaluations[0],
        "eval/last": evaluations[-1],
        **totals,
        **speeds,
    }


def passed(summary: Mapping[str, Any]) -> bool:
    """Whether no token, no gradient element, no expert of a token and no value of a critic differed
    over the run."""
    names = ("mismatched_tokens", "gradient_check/mismatched_elements")
    differing = [summary[f"consistency/{name}"] for name in names]
    of_some = ("value_check/mismatched_values", "rerouted_tokens")
    return not any([*differing, *(summary.get(f"consistency/{name}", 0) for name in of_some)])


def write_summary(
    config: RunConfig,
    found: Mapping[str, Any],
    seconds: float,
    processes: int,
    fingerprint: Fingerprint,
) -> dict[str, Any]:
    """Write `summary.json`, all or nothing, and return it: what a run found, under its name, and
    what its bits depend on."""
    consistency = config.consistency
    summary = {
        "name": config.run.name,
        "steps": config.training.steps,
        "seconds": round(seconds, 1),
        **found,
        "strategy": config.training.strategy,
        "processes": processes,
        **consistency.model_dump(mode="json", include={"gradient_leaves", "ordered"}),
        "weights_depend_on_processes": not consistency.ordered and processes > 1,
        "strict": current().as_record(),
        "fingerprint": fingerprint.entries,
    }
    text = json.dumps(plain(summary), indent=2, allow_nan=False)
    write_whole(config.run.output_dir / "summary.json", text + "\n")
    return summary
