"""GRPO: sample groups, score them, and follow the clipped policy gradient.

The behaviour logprobs are the rollout's own: training recomputes the same bits, so there is no
separate pass for "old" logprobs and the first importance ratio is exactly 1.
Source: Shao et al., DeepSeekMath (GRPO, 2024); Liu et al., Dr. GRPO (2025); Yu et al., DAPO (2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from rl_consistency.models.batch_layout import lay_out
from rl_consistency.models.token_logprobs import TokenLogprobs, token_logprobs
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.statistics import RolloutStatistics
from rl_consistency.rollout.weights import model_digest
from rl_consistency.trainers.advantages import group_advantages, overlong_mask, overlong_penalty
from rl_consistency.trainers.batch import LossConfig, TokenBatch, per_token
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.examples import DataOrder, Example
from rl_consistency.trainers.hooks import GradientStep, Metrics, Rollout, TrainerHook
from rl_consistency.trainers.losses import LossOutput, merge_outputs, policy_loss, token_weights
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.prompts import PromptSet
from rl_consistency.trainers.rewards import RewardFunction, compute_rewards


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One rollout batch, ready to learn from; everything is indexed by sample, in logical order.

    The rollout's own tensors are on the CPU, reference logprobs on the model's device.
    """

    sequences: list[list[int]]
    prompt_lengths: list[int]
    old_logprobs: list[Tensor]
    reference_logprobs: list[Tensor] | None
    advantages: Tensor
    """[S] fp32."""
    keep: Tensor | None
    """[S] bool, False where a sample is left out of the loss; None keeps all."""

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each sample."""
        return [len(t) for t in self.old_logprobs]


class GRPOTrainer:
    """One GRPO step at a time; the caller owns the loop over steps, checkpoints and tracking."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        engine: RolloutEngine,
        optimizer: PolicyOptimizer,
        accelerator: Accelerator,
        *,
        config: RunConfig,
        train: PromptSet,
        evaluation: PromptSet | None,
        rewards: Sequence[RewardFunction],
        hook: TrainerHook,
        reference: Any = None,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._engine = engine
        self._optimizer = optimizer
        self._accelerator = accelerator
        self._config = config
        self._train = train
        self._evaluation = evaluation
        self._rewards = rewards
        self._hook = hook
        self._reference = reference
        self._order = DataOrder(
            len(train.prompts),
            config.rollout.prompts_per_step,
            config.run.seed,
            config.data.shuffle,
        )
        self._sampling = config.sampling
        algorithm = config.algorithm
        self._loss_config = LossConfig(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coefficient=algorithm.kl_coefficient,
            entropy_coefficient=algorithm.entropy_coefficient,
        )
        # Of the weights the policy has now (initial or from a checkpoint), later of each update.
        self._weights_digest = model_digest(model)
        self._times: dict[str, float] = {}

    def step(self, step: int) -> Metrics:
        """Roll out, score, learn; `step` counts from 1. Returns the metrics of the step.

        Raises:
            FailedRequestsError: the model gave a logprob that is not finite; nothing was learned
                in this step, and the run ends.
            ConsistencyError: the weights are not those of the last update, or the hook raised it.
        """
        started = perf_counter()
        self._times = {"rollout": 0.0, "training": 0.0, "optimizer": 0.0}
        with self._timed("rollout"):
            examples, completions = self._roll_out(step)
        statistics = self._engine.stats
        metrics, experience = self._experience(step, examples, completions)
        metrics |= _rollout_metrics(statistics)
        metrics["learning_rate"] = self._optimizer.learning_rate
        metrics |= self._learn(experience)
        self._weights_digest = metrics["rollout/weights_digest"] = model_digest(self._model)
        metrics |= self._hook.on_step_end()
        tokens = sum(experience.lengths)
        passes = self._config.algorithm.epochs_per_rollout
        trained = passes * sum(len(sequence) for sequence in experience.sequences)
        metrics |= {f"time/{name}_seconds": seconds for name, seconds in self._times.items()}
        metrics["time/rollout_tokens_per_second"] = tokens / self._times["rollout"]
        metrics["time/training_tokens_per_second"] = trained / self._times["training"]
        metrics["time/step_seconds"] = perf_counter() - started
        metrics["tokens_per_second"] = tokens / metrics["time/step_seconds"]
        return metrics

    def evaluate(self) -> Metrics:
        """Mean reward of one greedy completion per evaluation example; {} without a set.

        Errors are those of the rollout in `step`.
        """
        if self._evaluation is None:
            return {}
        limit = self._config.training.eval_samples or len(self._evaluation.prompts)
        examples = list(self._evaluation.examples[:limit])
        greedy = replace(self._sampling, n=1, temperature=0.0)
        completions = self._engine.generate(
            self._evaluation.prompts[:limit], greedy, weights_digest=self._weights_digest
        )
        rewards = compute_rewards(self._rewards, examples, self._texts(completions))
        return {"eval/reward": fmean(rewards.total)}

    def _roll_out(self, step: int) -> tuple[list[Example], list[Completion]]:
        index = self._order.batch(step - 1)
        completions = self._engine.generate(
            [self._train.prompts[i] for i in index],
            self._sampling,
            prompt_ids=list(self._order.draws(step - 1)),
            weights_digest=self._weights_digest,
        )
        return [self._train.examples[index[c.prompt_index]] for c in completions], completions

    def _experience(
        self, step: int, examples: list[Example], completions: list[Completion]
    ) -> tuple[Metrics, Experience]:
        prompts = [self._train.prompts[example.id] for example in examples]
        sequences = [
            [*prompt, *completion.token_ids]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        prompt_lengths = [len(prompt) for prompt in prompts]
        old_logprobs = [completion.token_logprobs for completion in completions]
        metrics = self._hook.on_rollout(
            Rollout(
                step=step,
                sequences=sequences,
                prompt_lengths=prompt_lengths,
                logprobs=old_logprobs,
                sampling=self._sampling,
            )
        )
        rewards = compute_rewards(self._rewards, examples, self._texts(completions))
        shaped = torch.tensor(rewards.total, dtype=torch.float32)
        algorithm, longest = self._config.algorithm, self._sampling.max_tokens
        lengths = [len(t) for t in old_logprobs]
        keep = None
        if algorithm.overlong == "penalty":
            shaped = shaped + overlong_penalty(lengths, longest, algorithm.overlong_buffer)
        elif algorithm.overlong == "mask":
            keep = overlong_mask([completion.finish_reason for completion in completions])
        advantages = group_advantages(shaped, self._sampling.n, kind=algorithm.advantage)
        cut = sum(completion.finish_reason == "length" for completion in completions)
        metrics |= {
            "reward/mean": fmean(rewards.total),
            "reward/std": float(torch.tensor(rewards.total).std()),
            "completion/length_mean": fmean(lengths),
            "completion/length_max": max(lengths),
            "completion/cut_fraction": cut / len(completions),
        }
        metrics |= {f"reward/{name}": fmean(v) for name, v in rewards.by_function.items()}
        return metrics, Experience(
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            old_logprobs=old_logprobs,
            reference_logprobs=self._reference_logprobs(sequences, prompt_lengths),
            advantages=advantages,
            keep=keep,
        )

    def _learn(self, experience: Experience) -> Metrics:
        metrics: Metrics = {}
        algorithm = self._config.algorithm
        size = len(experience.sequences) // algorithm.updates_per_rollout
        updates: list[LossOutput] = []
        norms: list[float] = []
        for _ in range(algorithm.epochs_per_rollout):
            for first in range(0, len(experience.sequences), size):
                part = list(range(first, first + size))
                outputs, logprobs = self._backward(experience, part)
                if not updates:
                    rest = list(range(first + size, len(experience.sequences)))
                    logprobs += self._score(self._model, experience, rest)
                    metrics |= self._hook.on_training_logprobs(logprobs)
                metrics |= self._hook.on_gradients(
                    self._gradient_step(experience, part, first_of_step=not updates)
                )
                with self._timed("optimizer"):
                    norms.append(self._optimizer.step())
                updates.append(merge_outputs(outputs))
        return metrics | _mean_metrics(updates) | {"gradient_norm": fmean(norms)}

    def _backward(
        self, experience: Experience, part: list[int]
    ) -> tuple[list[LossOutput], list[Tensor]]:
        """Accumulate the gradients of one optimizer step, micro-batch by micro-batch.

        Returns:
            The loss of each micro-batch, and the logprobs of each sample.
        """
        outputs: list[LossOutput] = []
        logprobs: list[Tensor] = []
        for group in self._micro_batches(part):
            with self._timed("training"):
                scored = self._forward(self._model, experience, group)
                output = self._loss(experience, part, scored, group)
                self._accelerator.backward(output.loss)
            outputs.append(output)
            logprobs += [t.detach() for t in scored.split()]
        return outputs, logprobs

    def _loss(
        self, experience: Experience, part: list[int], scored: TokenLogprobs, group: Sequence[int]
    ) -> LossOutput:
        """The share of `group` in the loss of the optimizer step over `part`."""
        reference, device = experience.reference_logprobs, scored.logprobs.device
        old_logprobs = torch.cat([experience.old_logprobs[i] for i in group])
        advantages = per_token(experience.advantages[list(group)], scored.lengths)
        batch = TokenBatch(
            logprobs=scored.logprobs,
            old_logprobs=old_logprobs.to(device),
            advantages=advantages.to(device),
            sequence_ids=per_token(torch.tensor(list(group)), scored.lengths).to(device),
            lengths=scored.lengths,
            reference_logprobs=None
            if reference is None
            else torch.cat([reference[i] for i in group]),
            entropy=scored.entropy,
        )
        keep = None if experience.keep is None else experience.keep[list(group)]
        weights = token_weights(
            scored.lengths,
            self._config.algorithm.loss,
            num_sequences_global=len(part),
            max_tokens=self._sampling.max_tokens,
            total_tokens=sum(experience.lengths[i] for i in part),
            keep=keep,
            device=device,
        )
        return policy_loss(batch, weights, self._loss_config)

    def _gradient_step(
        self, experience: Experience, part: list[int], *, first_of_step: bool
    ) -> GradientStep:
        return GradientStep(
            sequences=[experience.sequences[i] for i in part],
            prompt_lengths=[experience.prompt_lengths[i] for i in part],
            sampling=self._sampling,
            loss=lambda scored, group: (
                self._loss(experience, part, scored, [part[i] for i in group]).loss
            ),
            first_of_step=first_of_step,
        )

    def _forward(self, model: Any, experience: Experience, group: list[int]) -> TokenLogprobs:
        layout = "packed" if self._config.training.layout == "packed" else "right_padded"
        inputs, mask = lay_out([experience.sequences[i] for i in group], layout, model.device)
        return token_logprobs(
            model,
            inputs,
            attention_mask=mask,
            prompt_lengths=[experience.prompt_lengths[i] for i in group],
            sampling=self._sampling,
        )

    @torch.no_grad()
    def _score(self, model: Any, experience: Experience, part: list[int]) -> list[Tensor]:
        with self._timed("training"):
            return [
                logprobs
                for group in self._micro_batches(part)
                for logprobs in self._forward(model, experience, group).split()
            ]

    def _reference_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int]
    ) -> list[Tensor] | None:
        if self._reference is None:
            return None
        unscored = Experience(
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            old_logprobs=[],
            reference_logprobs=None,
            advantages=torch.empty(0),
            keep=None,
        )
        return self._score(self._reference, unscored, list(range(len(sequences))))

    def _micro_batches(self, part: list[int]) -> Iterator[list[int]]:
        size = self._config.training.micro_batch_size
        for start in range(0, len(part), size):
            yield part[start : start + size]

    def _texts(self, completions: Sequence[Completion]) -> list[str]:
        return self._tokenizer.batch_decode(
            [completion.token_ids for completion in completions], skip_special_tokens=True
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block, with the device's work, to the times of the step."""
        started = finished_seconds(self._model.device)
        yield
        seconds = finished_seconds(self._model.device) - started
        self._times[name] = self._times.get(name, 0.0) + seconds


def _rollout_metrics(statistics: RolloutStatistics) -> Metrics:
    """How the engine was used. Like times, these may differ between runs with equal tokens."""
    names = (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "mean_seconds_to_first_token",
        "host_seconds_per_step",
        "peak_kv_share",
        "prefix_hit_tokens",
        "preemptions",
        "acceptance_rate",
    )
    return {f"time/rollout_{name}": getattr(statistics, name) for name in names}


def _mean_metrics(updates: Sequence[LossOutput]) -> Metrics:
    """Loss metrics, averaged over the optimizer steps of one rollout."""
    each = [update.metrics() for update in updates]
    return {name: fmean(metrics[name] for metrics in each) for name in each[0]}
