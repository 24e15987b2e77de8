"""PPO: the advantage of a token is what came after it against what a critic expected.

The KL to the reference is part of the reward. Policy and critic share no weights, so each has its
own backward passes and optimizer, over the same minibatches.
Source: Schulman et al., PPO (2017) and GAE (2016); Ouyang et al., InstructGPT (2022) for the KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from rl_consistency.distributed.world import require_same_facts
from rl_consistency.models.packing import Layout
from rl_consistency.trainers.advantages import (
    explained_variance,
    generalized_advantages,
    token_rewards,
    whitened,
)
from rl_consistency.trainers.algorithms.critic import Critic
from rl_consistency.trainers.algorithms.experience import Experience
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.algorithms.passes import backward_passes, in_groups
from rl_consistency.trainers.hooks import Metrics
from rl_consistency.trainers.losses import ClippedLoss, merge_outputs, value_loss
from rl_consistency.trainers.reward_functions import RewardError

CHECK_SIZE = 3
"""Sequences of a call when values are checked."""


@dataclass(eq=False, kw_only=True)
class PPOTrainer(GRPOTrainer):
    """The critic learns from each rollout after the policy has."""

    critic: Critic

    timed: ClassVar[tuple[str, ...]] = (*GRPOTrainer.timed, "critic")

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.config.algorithm.of_ppo is not None
        self._ppo = self.config.algorithm.of_ppo

    def step(self, step: int) -> Metrics:
        metrics = super().step(step)
        digest = self.critic.digest
        require_same_facts(self.ranks.world, {"the critic": digest}, when=f"after step {step}")
        return metrics | {"consistency/critic_digest": digest}

    def _judge(self, experience: Experience, rewards: Tensor) -> Metrics:
        with self._timed("critic"):
            values = self._values(experience, self._own, self._micro_batch_size, self._layout)
        again = partial(self._values, experience, self._own[::-1], CHECK_SIZE, "left_padded")
        metrics = self._told("the values", self.hook.on_values, values, again)
        kl = experience.kl() or [[0.0] * length for length in experience.lengths]
        if bool(rewards.isnan().any()):
            problem = (
                "ppo needs the reward of each completion, and all functions returned None for one"
            )
            raise RewardError(f"{problem}: let one score them all, or set algorithm.name to grpo")
        coefficient = self.config.algorithm.kl_coefficient
        given = [part.tolist() for part in values]
        factors = {"gamma": self._ppo.gamma, "gae_lambda": self._ppo.gae_lambda}
        advantages = [
            generalized_advantages(token_rewards(float(reward), part, coefficient), v, **factors)
            for reward, part, v in zip(rewards, kl, given, strict=True)
        ]
        returns = [[a + b for a, b in zip(*pair)] for pair in zip(advantages, given, strict=True)]
        metrics |= {
            "value/mean": fmean(v for part in given for v in part),
            "value/explained_variance": explained_variance(given, returns),
        }
        if self.reference is not None:
            metrics["reward/kl"] = fmean(sum(part) for part in kl)
        if self._ppo.whiten_advantages:
            advantages = whitened(advantages)
        experience.advantages, experience.values = [_fp32(part) for part in advantages], values
        experience.returns = [_fp32(part) for part in returns]
        return metrics

    @torch.no_grad()
    def _values(
        self, experience: Experience, samples: Sequence[int], size: int, layout: Layout
    ) -> list[Tensor]:
        """Values of all samples; those of `samples` are computed on this rank."""
        found = in_groups(samples, size, partial(self._evaluate, experience, layout))
        return [part.cpu() for part in self.ranks.shared_tensors("values", found)]

    def _evaluate(self, experience: Experience, layout: Layout, group: list[int]) -> list[Tensor]:
        sequences = [experience.sequences[i] for i in group]
        prompt_lengths = [experience.prompt_lengths[i] for i in group]
        return self.critic.model.values(sequences, prompt_lengths, layout)

    def _learn(self, experience: Experience) -> Metrics:
        metrics = super()._learn(experience)
        updates: list[ClippedLoss] = []
        norms: list[float] = []
        ranks = self.critic.ranks
        for part in self._minibatches(experience):
            loss = partial(self._value_loss, experience, part, self._layout)
            output, norm = self._backward("critic", ranks, part, loss)
            if not updates:
                loss = partial(self._value_loss, experience, part, "left_padded")
                again = backward_passes(ranks, part, loss)
                check = partial(ranks.check, len(part), self._micro_batch_size, again)
                given = self.hook.on_value_gradients, check
                metrics |= self._told("the critic's gradients", *given)
            with self._timed("critic"):
                norms.append(self._update(self.critic.optimizer, experience, part, norm))
            updates.append(output)
        return metrics | {
            "value/loss": fmean(update.loss.item() for update in updates),
            "value/clip_fraction": merge_outputs(updates).clip_fraction,
            "value/gradient_norm": fmean(norms),
        }

    def _value_loss(
        self, experience: Experience, part: list[int], layout: Layout, group: list[int]
    ) -> ClippedLoss:
        """The share of `group` in the critic's loss of the optimizer step over `part`."""
        values = torch.cat(self._evaluate(experience, layout, group))
        old, returns = (
            torch.cat([given[i] for i in group]).to(values.device)
            for given in (experience.values, experience.returns)
        )
        weights = self._weights(experience, part, group, values.device)
        return value_loss(values, old, returns, weights, clip=self._ppo.value_clip)


def _fp32(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
