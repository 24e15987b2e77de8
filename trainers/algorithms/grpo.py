"""GRPO: the advantage of a completion is its reward against those of its group.

Source: Shao et al., DeepSeekMath (GRPO, 2024); Liu et al., Dr. GRPO (2025); Yu et al., DAPO (2025).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rl_consistency.trainers.advantages import group_advantages
from rl_consistency.trainers.algorithms.experience import Experience
from rl_consistency.trainers.algorithms.loop import PolicyTrainer
from rl_consistency.trainers.hooks import Metrics
from rl_consistency.trainers.losses import per_token


class GRPOTrainer(PolicyTrainer):
    """Trains the policy alone on each rollout."""

    def _with_advantages(
        self, experience: Experience, rewards: Tensor
    ) -> tuple[Metrics, Experience]:
        kind, lengths = self.config.algorithm.advantage, experience.lengths
        advantages = per_token(group_advantages(rewards, self._sampling.n, kind=kind), lengths)
        groups = rewards.view(-1, self._sampling.n)
        equal = (groups == groups[:, :1]).all(dim=1)
        metrics: Metrics = {"reward/equal_group_fraction": float(equal.double().mean())}
        return metrics, replace(experience, advantages=advantages.split(lengths))
