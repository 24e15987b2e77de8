"""The step that all algorithms share: sample, score, and follow the clipped policy gradient.

The behaviour logprobs are the rollout's own: training recomputes the same bits, so there is no
separate pass for "old" logprobs and the first importance ratio is exactly 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_consistency.distributed.gradient_parts import cut
from rl_consistency.distributed.world import require_same_facts
from rl_consistency.models.packing import Layout, lay_out
from rl_consistency.models.scoring.token_logprobs import TokenLogprobs, token_logprobs
from rl_consistency.models.sharding import whole_weights
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.completion import Completion, routing_of
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.weights import model_digest
from rl_consistency.trainers.algorithms.experience import (
    Experience,
    rollout_metrics,
    samples_of,
    shaped_rewards,
)
from rl_consistency.trainers.algorithms.rollout_engine import ENGINE_METRICS
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.examples import DataOrder, Example
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.hooks import ConsistencyHook, GradientStep, Metrics, Rollout
from rl_consistency.trainers.losses import (
    LossConfig,
    LossOutput,
    TokenBatch,
    mean_metrics,
    merge_outputs,
    per_token,
    policy_loss,
    token_weights,
    with_balance,
)
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.rewards.compute import Rewards, agreed_rewards, compute_rewards
from rl_consistency.trainers.rewards.function import RewardFunction
from rl_consistency.trainers.strategies.strategy import Backward, Strategy


@dataclass(eq=False, kw_only=True)
class PolicyTrainer(ABC):
    """One step at a time; the caller owns the loop over steps, checkpoints and tracking.

    A subclass says what a token's advantage is, and what else is learned from a rollout.

    Several ranks take the same steps. A rank draws and learns from the samples of its own parts;
    tokens, logprobs and losses of all samples are known to all ranks. Rewards come from rank 0.
    """

    model: Any
    """The patched policy; `ranks.model` is what wraps it."""
    tokenizer: Any
    engine: RolloutEngine
    optimizer: PolicyOptimizer
    ranks: Strategy
    config: RunConfig
    train: PromptSet
    evaluation: PromptSet | None
    rewards: Sequence[RewardFunction]
    hook: ConsistencyHook
    reference: Any = None
    """The patched, frozen policy of the KL term; None without that term."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Completions of the last step that people are shown, each with its reward."""
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None
    """Told what is done of a phase of the step."""

    _routing: dict[int, Tensor] = field(init=False)  # of the samples scored last
    timed: ClassVar[tuple[str, ...]] = ("rollout", "training", "optimizer")  # phases of a step

    @abstractmethod
    def _with_advantages(
        self, experience: Experience, rewards: Tensor
    ) -> tuple[Metrics, Experience]:
        """The advantages of all tokens, from the rewards [S] fp32 of the samples."""

    def __post_init__(self) -> None:
        config, size = self.config, self.config.rollout.prompts_per_step
        self._sampling = config.sampling
        self._order = DataOrder(len(self.train.prompts), size, config.run.seed, config.data.shuffle)
        shape = {field.name: getattr(config.algorithm, field.name) for field in fields(LossConfig)}
        self._loss_config = LossConfig(**shape)
        batch = size * self._sampling.n
        self._update_size = batch // config.algorithm.updates_per_rollout
        firsts, own = range(0, batch, self._update_size), self.ranks.own(self._update_size)
        self._own = [first + i for first in firsts for i in own]
        self._balances, self._routing = config.algorithm.balance_coefficient, {}
        self._micro_batch_size = config.training.micro_batch_size
        # Of the weights the policy has now (initial or from a checkpoint), later of each update.
        self.weights_digest = self._common_digest("before the first step")

    def step(self, step: int) -> Metrics:
        """Roll out, score, learn; `step` counts from 1. Returns the metrics of the step.

        Raises:
            FailedRequestsError: a logprob is not finite; nothing was learned in this step.
            ConsistencyError: the weights are not those of the last update or not the same on all
                ranks, or the hook raised it.
        """
        started = perf_counter()
        self._times, self.samples = dict.fromkeys(self.timed, 0.0), []
        self._trained = 0
        with self._timed("rollout"):
            index, completions = self._roll_out(step)
        statistics = self.engine.stats
        metrics, experience = self._experience(step, index, completions)
        # How the engine was used. Like times, these may differ between runs with equal tokens.
        metrics |= {f"time/rollout_{name}": getattr(statistics, name) for name in ENGINE_METRICS}
        metrics |= self._learn(experience)
        with whole_weights(self.model):
            self.weights_digest = self._common_digest(f"after step {step}")
            metrics["rollout/weights_digest"] = self.weights_digest
            metrics |= self._told("the end of the step", self.hook.on_step_end)
        tokens = sum(experience.lengths)
        trained = self.config.algorithm.epochs_per_rollout * sum(map(len, experience.sequences))
        metrics |= {f"time/{name}_seconds": seconds for name, seconds in self._times.items()}
        metrics["time/rollout_tokens_per_second"] = tokens / self._times["rollout"]
        metrics["time/training_tokens_per_second"] = trained / self._times["training"]
        metrics["time/step_seconds"] = perf_counter() - started
        metrics["tokens_per_second"] = tokens / metrics["time/step_seconds"]
        return metrics

    def evaluate(self) -> Metrics:
        """Mean reward of one greedy completion per evaluation example; {} without a set."""
        if self.evaluation is None:
            return {}
        there = len(self.evaluation.prompts)
        limit = min(self.config.training.eval_samples or there, there)
        greedy = replace(self._sampling, n=1, temperature=0.0)
        own = cut(limit, self.ranks.world.size)[self.ranks.world.rank]
        drawn = self._draw(self.evaluation, list(own), greedy, list(own))
        completions = self.ranks.shared("evaluation", {own[c.prompt_index]: c for c in drawn})
        rewards = self._rewards(self.evaluation.examples[:limit], completions)
        return {"eval/reward": fmean(rewards.total)}

    def _roll_out(self, step: int) -> tuple[list[int], list[Completion]]:
        """The place in the training set of each sample's prompt, and the samples."""
        index, draws = self._order.batch(step - 1), list(self._order.draws(step - 1))
        n = self._sampling.n
        # A group that a part's border cuts is drawn on both sides of it: the same samples.
        own = sorted({i // n for i in self._own})
        chosen = [index[i] for i in own]
        drawn = self._draw(self.train, chosen, self._sampling, [draws[i] for i in own])
        samples = {own[c.prompt_index] * n + c.sample_index: c for c in drawn}
        completions = self.ranks.shared("completions", {i: samples[i] for i in self._own})
        return [i for i in index for _ in range(n)], completions

    def _draw(
        self, source: PromptSet, chosen: list[int], sampling: SamplingParams, ids: list[int]
    ) -> list[Completion]:
        """Completions of the chosen prompts, drawn by this rank."""
        phase = "rollout" if source is self.train else "evaluation"
        with whole_weights(self.model), self.ranks.world.agreed("rollout"):
            return self.engine.generate(
                [source.prompts[i] for i in chosen],
                sampling,
                prompt_ids=ids,
                weights_digest=self.weights_digest,
                progress=lambda _, done, total: self.progress(phase, done, total),
            )

    def _rewards(self, examples: Sequence[Example], completions: Sequence[Completion]) -> Rewards:
        """Reward functions see a whole batch in logical order, and run once."""
        self.progress("rewards", 0, 0)
        score = partial(
            compute_rewards,
            self.rewards,
            examples,
            self._texts(completions),
            token_ids=[completion.token_ids for completion in completions],
            timeout=self.config.reward.timeout,
        )
        return agreed_rewards(self.ranks.world, score)

    def _experience(
        self, step: int, index: list[int], completions: list[Completion]
    ) -> tuple[Metrics, Experience]:
        examples = [self.train.examples[i] for i in index]
        prompts = [self.train.prompts[i] for i in index]
        sequences = [[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)]
        prompt_lengths = [len(prompt) for prompt in prompts]
        old_logprobs = [completion.token_logprobs for completion in completions]
        rollout = Rollout(
            step=step,
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            logprobs=old_logprobs,
            sampling=self._sampling,
            places=[(e.id, c.sample_index) for e, c in zip(examples, completions, strict=True)],
            routing=routing_of(completions),
        )
        metrics = self._told("the rollout", self.hook.on_rollout, rollout)
        rewards = self._rewards(examples, completions)
        shown = partial(samples_of, examples, completions, rewards, self._texts)
        self.samples = shown(n=self._sampling.n, count=self.config.tracking.samples)
        longest = self._sampling.max_tokens
        shaped, keep = shaped_rewards(completions, rewards, self.config.algorithm, longest)
        metrics |= rollout_metrics(completions, rewards)
        experience = Experience(
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            old_logprobs=old_logprobs,
            keep=keep,
        )
        if self.reference is not None:
            scored = self._score(self.reference, experience, list(range(len(sequences))))
            experience = replace(experience, reference_logprobs=scored)
        found, experience = self._with_advantages(experience, shaped)
        return metrics | found, experience

    def _learn(self, experience: Experience) -> Metrics:
        metrics: Metrics = {}
        updates: list[LossOutput] = []
        norms: list[float] = []
        self._routing.clear()
        for part in self._minibatches(experience):
            output, logprobs, norm = self._backward(experience, part)
            if not updates:
                others = list(range(len(part), len(experience.sequences)))
                with whole_weights(self.model):
                    logprobs += self._score(self.model, experience, others)
                    given: list[Any] = [self.hook.on_training_logprobs, logprobs]
                    if self._routing:
                        given.append(self.ranks.shared_tensors("routing", self._routing))
                    metrics |= self._told("training logprobs", *given)
            taken = self._gradient_step(experience, part, not updates)
            metrics |= self._told("gradients", self.hook.on_gradients, taken)
            metrics["learning_rate"] = self.optimizer.learning_rate
            with self._timed("optimizer"):
                norms.append(self.optimizer.step(norm))
            updates.append(output)
        return metrics | mean_metrics(updates) | {"gradient_norm": fmean(norms)}

    def _minibatches(self, experience: Experience) -> Iterator[list[int]]:
        """The samples of each optimizer step on a rollout."""
        samples, size = list(range(len(experience.sequences))), self._update_size
        for _ in range(self.config.algorithm.epochs_per_rollout):
            yield from (samples[i : i + size] for i in range(0, len(samples), size))

    def _backward(
        self, experience: Experience, part: list[int]
    ) -> tuple[LossOutput, list[Tensor], float]:
        """The gradients of one optimizer step; its loss, its logprobs, and the gradients' norm."""
        outputs: dict[int, LossOutput] = {}
        logprobs: dict[int, Tensor] = {}

        def keep(group: list[int], scored: TokenLogprobs, output: LossOutput) -> None:
            outputs[group[0]] = output
            logprobs.update(zip(group, scored.logprobs.detach().split(scored.lengths)))
            self._trained += len(group)
            passes = self.config.algorithm.epochs_per_rollout
            self.progress("training", self._trained, passes * len(self._own))

        passes = self._passes(experience, part, keep)
        with self._timed("training"):
            norm = self.ranks.accumulate(len(part), self._micro_batch_size, passes)
        output = merge_outputs(self.ranks.shared_tensors("losses", outputs))
        return output, self.ranks.shared_tensors("training logprobs", logprobs), norm

    def _passes(
        self,
        experience: Experience,
        part: list[int],
        keep: Callable[[list[int], TokenLogprobs, LossOutput], None],
    ) -> Backward:
        """The backward passes of the optimizer step over `part`; `keep` is given what is found."""

        def backward(batch: range, is_filler: bool) -> None:
            group = [part[i] for i in batch]
            scored = self._forward(self.ranks.model, experience, group)
            output = self._loss(experience, part, scored, group)
            self.ranks.backward(output.loss * 0.0 if is_filler else output.loss)
            if not is_filler:
                keep(group, scored, output)

        return backward

    def _loss(
        self, experience: Experience, part: list[int], scored: TokenLogprobs, group: Sequence[int]
    ) -> LossOutput:
        """The share of `group` in the loss of the optimizer step over `part`."""
        group, device = list(group), scored.logprobs.device
        lengths, reference = scored.lengths, experience.reference_logprobs
        anchor = None if reference is None else torch.cat([reference[i] for i in group])
        batch = TokenBatch(
            logprobs=scored.logprobs,
            old_logprobs=torch.cat([experience.old_logprobs[i] for i in group]).to(device),
            advantages=torch.cat([experience.advantages[i] for i in group]).to(device),
            sequence_ids=per_token(torch.tensor(group), lengths).to(device),
            lengths=lengths,
            reference_logprobs=anchor,
            entropy=scored.entropy,
        )
        weights = self._weights(experience, part, group, device)
        output = policy_loss(batch, weights, self._loss_config)
        if scored.balance is None:
            return output
        return with_balance(output, scored.balance, self._balances / len(part))

    def _weights(
        self, experience: Experience, part: list[int], group: list[int], device: torch.device
    ) -> Tensor:
        """[N] fp32, of the tokens of `group` in the optimizer step over `part`."""
        keep = experience.keep
        return token_weights(
            [experience.lengths[i] for i in group],
            self.config.algorithm.loss,
            num_sequences_global=len(part),
            max_tokens=self._sampling.max_tokens,
            total_tokens=sum(experience.lengths[i] for i in part),
            keep=None if keep is None else keep[group],
            device=device,
        )

    def _gradient_step(self, experience: Experience, part: list[int], first: bool) -> GradientStep:
        def loss(scored: TokenLogprobs, group: Sequence[int]) -> Tensor:
            return self._loss(experience, part, scored, [part[i] for i in group]).loss

        passes = self._passes(experience, part, lambda *found: None)
        check = partial(self.ranks.check, len(part), self._micro_batch_size, passes)
        return GradientStep(
            sequences=[experience.sequences[i] for i in part],
            prompt_lengths=[experience.prompt_lengths[i] for i in part],
            sampling=self._sampling,
            loss=loss,
            first_of_step=first,
            balance=self._balances > 0,
            gradients=self.ranks.whole(self.ranks.gradients()),
            check=check if self.ranks.order.count > 1 or self.ranks.keeps_shards else None,
        )

    def _forward(self, model: Any, experience: Experience, group: list[int]) -> TokenLogprobs:
        inputs, mask = lay_out([experience.sequences[i] for i in group], self._layout, model.device)
        scored = token_logprobs(
            model,
            inputs,
            attention_mask=mask,
            prompt_lengths=[experience.prompt_lengths[i] for i in group],
            sampling=self._sampling,
            share_prompts=not torch.is_grad_enabled(),
            balance=torch.is_grad_enabled() and self._balances > 0,
        )
        if scored.routing is not None:
            self._routing.update(zip(group, scored.routing.split(scored.lengths)))
        return scored

    @torch.no_grad()
    def _score(self, model: Any, experience: Experience, part: list[int]) -> list[Tensor]:
        own = sorted({*self._own} & {*part})
        with self._timed("training"), whole_weights(self.model):
            found = in_groups(
                own,
                self._micro_batch_size,
                lambda group: self._forward(model, experience, group).split(),
            )
        return self.ranks.shared_tensors("scored logprobs", found)

    @property
    def _layout(self) -> Layout:
        return "packed" if self.config.training.layout == "packed" else "right_padded"

    def _told(self, what: str, method: Callable[..., Metrics], *given: Any) -> Metrics:
        """What a method of the hook returns: an error on one rank is one on all."""
        with self.ranks.world.agreed(f"the hook of {what}"):
            return method(*given)

    def _common_digest(self, when: str) -> str:
        """Digest of the weights, which must be the same on all ranks."""
        digest = model_digest(self.model)
        require_same_facts(self.ranks.world, {"the weights": digest}, when=when)
        return digest

    def _texts(self, completions: Sequence[Completion]) -> list[str]:
        token_ids = [completion.token_ids for completion in completions]
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block, with the device's work, to the times of the step."""
        started = finished_seconds(self.model.device)
        yield
        self._times[name] += finished_seconds(self.model.device) - started


def in_groups(
    samples: Sequence[int], size: int, compute: Callable[[list[int]], Sequence[Tensor]]
) -> dict[int, Tensor]:
    """What `compute` gives of each of the samples, which it takes in groups of at most `size`."""
    found: dict[int, Tensor] = {}
    for start in range(0, len(samples), size):
        group = list(samples[start : start + size])
        found.update(zip(group, compute(group), strict=True))
    return found
