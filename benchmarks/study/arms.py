"""What the study compares: our trainer, and its loop around a stock rollout and stock training.

All arms have the same data, rewards, advantages, loss, fp32 masters and optimizer. The stock arms
replace what gives log-probabilities and gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.study.stock import sample, score
from rl_consistency.models.patch import patched_session
from rl_consistency.models.scoring.token_logprobs import TokenLogprobs
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.tokenizer import eos_token_ids
from rl_consistency.trainers.algorithms.experience import Experience
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.data.examples import keyed_integer
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.hooks import Metrics


class StockTrainer(GRPOTrainer):
    """Samples and trains by the unpatched Hugging Face model, forward and backward.

    Old logprobs are those that training recomputes before the first update, in the batches of the
    updates. That the rollout gave others is not corrected, as in a trainer that takes its rollouts
    for its own.
    """

    most_weight: float | None = None
    """Where tokens are weighted by training / rollout probability, its upper bound; None: not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._session = patched_session(self.model)
        # Every step drifts: nothing is saved of it.
        self.hook.replay_dir = self.hook.monitor.replay_dir = None

    def _draw(
        self, source: PromptSet, chosen: list[int], sampling: SamplingParams, ids: list[int]
    ) -> list[Completion]:
        with self._session.stock() as model:
            return sample(
                model,
                [source.prompts[i] for i in chosen],
                sampling,
                eos_token_ids=eos_token_ids(self.model, self.tokenizer),
                seed=keyed_integer(self.config.run.seed, "stock", *ids) % 2**63,
            )

    def _forward(self, model: Any, experience: Experience, group: list[int]) -> TokenLogprobs:
        with self._session.stock() as stock:
            return score(
                stock,
                [experience.sequences[i] for i in group],
                [experience.prompt_lengths[i] for i in group],
                self._sampling.temperature,
            )

    def _backward(self, *given: Any) -> Any:
        with self._session.stock():  # its numeric settings too
            return super()._backward(*given)

    def _experience(self, *given: Any) -> tuple[Metrics, Experience]:
        metrics, experience = super()._experience(*given)
        samples, size = list(range(len(experience.sequences))), self._update_size
        parts = [samples[i : i + size] for i in samples[::size]]
        old = [t.cpu() for part in parts for t in self._score(self.model, experience, part)]
        if self.most_weight is not None:
            pairs = zip(old, experience.logprobs, strict=True)
            ratios = [(own - rollout).exp() for own, rollout in pairs]
            pairs = zip(experience.advantages, ratios, strict=True)
            weighted = [a * r.clamp(max=self.most_weight) for a, r in pairs]
            experience.advantages = weighted
            every = torch.cat(ratios).double()
            metrics["study/weight/mean"] = every.clamp(max=self.most_weight).mean().item()
            metrics["study/weight/truncated"] = (every > self.most_weight).double().mean().item()
        return metrics, replace(experience, logprobs=old)


class TruncatedTrainer(StockTrainer):
    """The same with truncated importance sampling: a token's term is multiplied by min(training /
    rollout probability, 2), without a gradient.

    Source: Yao et al., Your efficient RL framework secretly brings you off-policy RL training
    (2025); the bound is verl's default.
    """

    most_weight = 2.0


ARMS: dict[str, type[GRPOTrainer]] = {
    "exact": GRPOTrainer,
    "stock": StockTrainer,
    "truncated": TruncatedTrainer,
}
