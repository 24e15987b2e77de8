"""GRPO: the advantage of a completion is its reward against those of its group.

The behaviour logprobs are the rollout's own: training recomputes the same bits, so there is no
separate pass for "old" logprobs and the first importance ratio is exactly 1.
Source: Shao et al., DeepSeekMath (GRPO, 2024); Liu et al., Dr. GRPO (2025); Yu et al., DAPO (2025);
`losses.LOSSES` and `advantages` name those of the other cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.parity.gradients import GradientReport
from rl_consistency.rollout.completion import Completion, routing_of
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.weights import model_digest
from rl_consistency.trainers.advantages import (
    equal_groups,
    overlong_mask,
    overlong_penalty,
    token_advantages,
)
from rl_consistency.trainers.algorithms.dynamic_sampling import Drawn, fill_batch
from rl_consistency.trainers.algorithms.experience import Experience, rollout_metrics, samples_of
from rl_consistency.trainers.algorithms.passes import backward_passes, in_groups
from rl_consistency.trainers.algorithms.rollout_engine import ENGINE_METRICS
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.evaluation import evaluation_metrics, sampling_of
from rl_consistency.trainers.hooks import ConsistencyHook, Metrics, regrouped
from rl_consistency.trainers.losses import (
    LOSSES,
    L,
    LossOutput,
    TokenBatch,
    mean_metrics,
    merge_outputs,
    policy_loss,
    token_weights,
    with_balance,
)
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.reward_functions import RewardError
from rl_consistency.trainers.rewards import RewardFunction, Rewards, compute_rewards
from rl_consistency.trainers.strategies.strategy import Strategy


@dataclass(eq=False, kw_only=True)
class GRPOTrainer:
    """One step at a time; the caller owns the loop over steps, checkpoints and tracking.

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
    evaluations: Mapping[str, PromptSet]
    """By name; the set named "" is that of the recipe's task or eval_path."""
    rewards: Sequence[RewardFunction]
    hook: ConsistencyHook
    reference: Any = None
    """The patched, frozen policy of the KL term; None without that term."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Completions of the last step that people are shown, each with its reward."""
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None
    """Told what is done of a phase of the step."""
    extra_rounds: int = 0
    """Rollout batches that earlier steps drew beyond one each, in dynamic sampling."""

    _routing: dict[int, Tensor] = field(init=False)  # of the samples scored last
    timed: ClassVar[tuple[str, ...]] = ("rollout", "training", "optimizer")  # phases of a step

    def __post_init__(self) -> None:
        config, size = self.config, self.config.rollout.prompts_per_step
        self._sampling = config.sampling
        self._order = self.train.order(size, config.run.seed, config.data.shuffle)
        shape = {"clip_low", "clip_high", "kl_coefficient", "entropy_coefficient"}
        self._form = LOSSES[config.algorithm.loss]
        self._loss_settings: dict[str, Any] = config.algorithm.model_dump(include=shape)
        self._loss_settings["surrogate"] = self._form.surrogate
        if config.algorithm.kl_in_reward:
            self._loss_settings["kl_coefficient"] = 0.0
        batch = size * self._sampling.n
        self._update_size = batch // config.algorithm.updates_per_rollout
        firsts, own = range(0, batch, self._update_size), self.ranks.own(self._update_size)
        self._own = [first + i for first in firsts for i in own]
        self._balances, self._routing = config.algorithm.balance_coefficient, {}
        self._micro_batch_size = config.training.micro_batch_size
        self._layout: Layout = "packed" if config.training.layout == "packed" else "right_padded"
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
        self._passed: Counter[str] = Counter()
        drawn, found = self._drawn(step)
        used = self.engine.stats
        metrics, experience = self._experience(step, *drawn)
        metrics |= found
        # How the engine was used. Like times, these may differ between runs with equal tokens.
        metrics |= {f"time/rollout_{name}": getattr(used, name) for name in ENGINE_METRICS}
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

    def evaluate(self, step: int = 0) -> Metrics:
        """Metrics of each evaluation set after `step`: mean reward, pass@k. Without an unnamed set
        eval/reward is the mean over the named ones; {} without a set."""
        metrics: Metrics = {}
        for name, prompts in self.evaluations.items():
            there, sampling = len(prompts.prompts), sampling_of(self.config, name, step)
            limit, n = min(self.config.training.eval_samples or there, there), sampling.n
            own = list(cut(limit, self.ranks.world.size)[self.ranks.world.rank])
            drawn = self._draw(prompts, own, sampling, own)
            found = {own[c.prompt_index] * n + c.sample_index: c for c in drawn}
            completions = self.ranks.shared("evaluation", found)
            examples = [e for e in prompts.examples[:limit] for _ in range(n)]
            rewards = self._rewards(examples, completions)
            metrics |= evaluation_metrics(self.config, name, rewards.total)
        if self.evaluations and "" not in self.evaluations:
            keys = (f"eval/{name}/reward" for name in self.evaluations)
            if each := [float(metrics[key]) for key in keys if key in metrics]:
                metrics["eval/reward"] = fmean(each)
        return metrics

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
        """Reward functions see a whole batch in logical order, and run once, on rank 0; what fails
        there is a RewardError on all ranks."""
        self.progress("rewards", 0, 0)
        score = partial(
            compute_rewards,
            self.rewards,
            examples,
            self._texts(completions),
            token_ids=[completion.token_ids for completion in completions],
            timeout=self.config.reward.timeout,
        )
        try:
            return self.ranks.world.from_first("rewards", score)
        except ValueError as error:
            raise RewardError(str(error)) from error.__cause__

    def _drawn(self, step: int) -> tuple[tuple[Any, ...], Metrics]:
        """What `_experience` takes of a step, and how dynamic sampling found it."""
        dynamic, first = self.config.algorithm.dynamic_sampling, step + self.extra_rounds

        def draw(round: int) -> Drawn:
            with self._timed("rollout"):
                index, completions = self._roll_out(first + round)
            rewards = self._rewards([self.train.examples[i] for i in index], completions)
            return Drawn(index, completions, rewards, self._shaped(completions, rewards))

        if dynamic is None:
            with self._timed("rollout"):
                return self._roll_out(step), {}
        size, n = self.config.rollout.prompts_per_step, self._sampling.n
        drawn, rounds, found = fill_batch(draw, size, n, dynamic.max_rounds)
        self.extra_rounds += rounds - 1
        return drawn, found

    def _shaped(self, completions: Sequence[Completion], rewards: Rewards) -> Tensor:
        """[S] fp64, the rewards with what length costs."""
        shaped, algorithm = torch.tensor(rewards.total, dtype=torch.float64), self.config.algorithm
        if algorithm.overlong != "penalty":
            return shaped
        lengths, longest = [len(c.token_ids) for c in completions], self._sampling.max_tokens
        return shaped + overlong_penalty(lengths, longest, algorithm.overlong_buffer)

    def _experience(
        self,
        step: int,
        index: list[int],
        completions: list[Completion],
        rewards: Rewards | None = None,
        shaped: Tensor | None = None,
    ) -> tuple[Metrics, Experience]:
        examples = [self.train.examples[i] for i in index]
        prompts = [self.train.prompts[i] for i in index]
        experience = Experience(
            step=step,
            sequences=[[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)],
            prompt_lengths=[len(prompt) for prompt in prompts],
            logprobs=[completion.token_logprobs for completion in completions],
            sampling=self._sampling,
            places=[(e.id, c.sample_index) for e, c in zip(examples, completions, strict=True)],
            routing=routing_of(completions),
        )
        metrics = self._told("the rollout", self.hook.on_rollout, experience)
        if rewards is None:
            rewards = self._rewards(examples, completions)
        if shaped is None:
            shaped = self._shaped(completions, rewards)
        shown = partial(samples_of, examples, completions, rewards, self._texts)
        self.samples = shown(n=self._sampling.n, count=self.config.tracking.samples)
        if self.config.algorithm.overlong in ("mask", "mask_counted"):
            experience.keep = overlong_mask([c.finish_reason for c in completions])
        metrics |= rollout_metrics(completions, rewards)
        if self.reference is not None:
            everything = list(range(len(completions)))
            experience.reference_logprobs = self._score(self.reference, experience, everything)
        return metrics | self._judge(experience, shaped), experience

    def _judge(self, experience: Experience, rewards: Tensor) -> Metrics:
        """Give each token its advantage, from the rewards [S] fp64 of the samples."""
        algorithm, n = self.config.algorithm, self._sampling.n
        kl = experience.kl() if algorithm.kl_in_reward else None
        experience.advantages = token_advantages(
            algorithm.advantage,
            rewards,
            n,
            experience.lengths,
            kl=kl,
            coefficient=algorithm.kl_coefficient,
        )
        # Without groups equal rewards of all samples are what teaches nothing.
        size = len(rewards) if algorithm.advantage == "reinforce_plus_plus" else n
        equal = equal_groups(rewards, size)
        metrics: Metrics = {"reward/equal_group_fraction": float(equal.double().mean())}
        if kl is not None:
            metrics["reward/kl"] = fmean(sum(part) for part in kl)
        return metrics

    def _learn(self, experience: Experience) -> Metrics:
        metrics: Metrics = {}
        updates: list[LossOutput] = []
        norms: list[float] = []
        self._routing.clear()
        for part in self._minibatches(experience):
            loss = partial(self._loss, experience, part)
            output, norm = self._backward("training", self.ranks, part, loss)
            if not updates:
                logprobs = list(output.logprobs.split([experience.lengths[i] for i in part]))
                others = list(range(len(part), len(experience.sequences)))
                with whole_weights(self.model):
                    logprobs += self._score(self.model, experience, others)
                    given: list[Any] = [self.hook.on_training_logprobs, logprobs]
                    if self._routing:
                        given.append(self.ranks.shared_tensors("routing", self._routing))
                    metrics |= self._told("training logprobs", *given)
                gradients = self.ranks.whole(self.ranks.gradients())
                check = partial(self._check, experience, part)
                metrics |= self._told("gradients", self.hook.on_gradients, gradients, check)
            metrics["learning_rate"] = self.optimizer.learning_rate
            with self._timed("optimizer"):
                norms.append(self._update(self.optimizer, experience, part, norm))
            updates.append(output)
        if experience.keep is not None:
            skipped = sum(self._all_cut(experience, p) for p in self._minibatches(experience))
            metrics["policy/skipped_updates"] = skipped
        return metrics | mean_metrics(updates) | {"gradient_norm": fmean(norms)}

    def _update(
        self, optimizer: PolicyOptimizer, experience: Experience, part: list[int], norm: float
    ) -> float:
        """Step an optimizer, or skip an update of which all completions are masked; the norm."""
        return optimizer.skip(norm) if self._all_cut(experience, part) else optimizer.step(norm)

    def _all_cut(self, experience: Experience, part: list[int]) -> bool:
        """Whether all completions of `part` are left out of the loss."""
        return experience.keep is not None and not bool(experience.keep[part].any())

    def _minibatches(self, experience: Experience) -> Iterator[list[int]]:
        """The samples of each optimizer step on a rollout."""
        samples, size = list(range(len(experience.sequences))), self._update_size
        for _ in range(self.config.algorithm.epochs_per_rollout):
            yield from (samples[i : i + size] for i in range(0, len(samples), size))

    def _backward(
        self, phase: str, ranks: Strategy, part: list[int], loss: Callable[[list[int]], L]
    ) -> tuple[L, float]:
        """The gradients of the optimizer step over `part`; its loss, and the gradients' norm."""
        outputs: dict[int, L] = {}
        most = self.config.algorithm.epochs_per_rollout * len(self._own)

        def keep(group: list[int], output: L) -> None:
            outputs[group[0]] = output
            self._passed[phase] += len(group)
            self.progress(phase, self._passed[phase], most)

        with self._timed(phase):
            passes = backward_passes(ranks, part, loss, keep)
            norm = ranks.accumulate(len(part), self._micro_batch_size, passes)
        return merge_outputs(ranks.shared_tensors("losses", outputs)), norm

    def _loss(self, experience: Experience, part: list[int], group: list[int]) -> LossOutput:
        """The share of `group` in the loss of the optimizer step over `part`."""
        scored = self._forward(self.ranks.model, experience, group)
        return self._loss_of(experience, part, scored, group)

    def _loss_of(
        self, experience: Experience, part: list[int], scored: TokenLogprobs, group: list[int]
    ) -> LossOutput:
        device, lengths = scored.logprobs.device, scored.lengths
        reference = experience.reference_logprobs
        anchor = None if reference is None else torch.cat([reference[i] for i in group])
        batch = TokenBatch(
            logprobs=scored.logprobs,
            old_logprobs=torch.cat([experience.logprobs[i] for i in group]).to(device),
            advantages=torch.cat([experience.advantages[i] for i in group]).to(device),
            lengths=lengths,
            reference_logprobs=anchor,
            entropy=scored.entropy,
        )
        weights = self._weights(experience, part, group, device)
        output = policy_loss(batch, weights, **self._loss_settings)
        if scored.balance is None:
            return output
        return with_balance(output, scored.balance, self._balances / len(part))

    def _weights(
        self, experience: Experience, part: list[int], group: list[int], device: torch.device
    ) -> Tensor:
        """[N] fp32, of the tokens of `group` in the optimizer step over `part`."""
        keep, leaves = experience.keep, self.config.algorithm.overlong == "mask"
        counted = [i for i in part if not leaves or keep is None or keep[i]]
        return token_weights(
            [experience.lengths[i] for i in group],
            self._form.weights,
            num_sequences_global=len(part),
            max_tokens=self._sampling.max_tokens,
            total_tokens=sum(experience.lengths[i] for i in counted),
            keep=None if keep is None else keep[group],
            device=device,
        )

    def _check(self, experience: Experience, part: list[int]) -> GradientReport:
        """Compare the gradients of the optimizer step over `part` with others of it."""
        if self.ranks.order.count > 1 or self.ranks.keeps_shards:
            passes = backward_passes(self.ranks, part, partial(self._loss, experience, part))
            return self.ranks.check(len(part), self._micro_batch_size, passes)

        def loss(scored: TokenLogprobs, group: Sequence[int]) -> Tensor:
            return self._loss_of(experience, part, scored, [part[i] for i in group]).loss

        return regrouped(
            self.model,
            [experience.sequences[i] for i in part],
            [experience.prompt_lengths[i] for i in part],
            self.config.consistency.gradient_check_sequences,
            loss=loss,
            sampling=self._sampling,
            balance=self._balances > 0,
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
            check_support=False,  # drift is reported by the hook
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
        skip = self.config.reward.skip_special_tokens
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=skip)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block, with the device's work, to the times of the step."""
        started = finished_seconds(self.model.device)
        yield
        self._times[name] += finished_seconds(self.model.device) - started
