"""A warning where the rewards of a step tell nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class NoSignal:
    """Warns at the first of several steps in a row in which each group's rewards are all equal."""

    warn: Callable[[str], None]
    warned: bool = False

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Read the metrics of a step; warn at the first of several without a signal."""
        silent = metrics.get("reward/equal_group_fraction") == 1.0
        if silent and not self.warned:
            self.warn(
                f"step {step}: the rewards within each group are equal, so all advantages are 0 "
                "and nothing is learned from them. samples.jsonl shows completions; give easier or "
                "harder tasks, larger groups (rollout.sampling.n) or a finer reward"
            )
        self.warned = silent
