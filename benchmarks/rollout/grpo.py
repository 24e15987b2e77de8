"""A GRPO step end to end: rollout, the training forward and backward passes, the update.

Strict is this library's engine and scoring. Stock is what is left without it: the same engine with
stock ops (Hugging Face's own `generate` is many times slower, see its rows), then the unpatched
Hugging Face model on the padded batch, with log_softmax of the completions' logits. Optimizer, loss
and micro-batches are the same; rewards are a function of the tokens. All completions are as long,
so that stock pads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.rollout.cases import MODES, Mode, engine_for
from benchmarks.rollout.measure import timed_generation
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.workload import Workload, requests
from benchmarks.suite import Bench, Case
from rl_consistency.models.patch import patched_session
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.drift import DriftReport, compare_logprobs
from rl_consistency.trainers.advantages import group_advantages
from rl_consistency.trainers.batch import LossConfig, TokenBatch, per_token
from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.losses import policy_loss, token_weights
from rl_consistency.trainers.optimizer import PolicyOptimizer

LEARNING_RATE = 1e-6

Score = Callable[[Any, list[list[int]]], Tensor]
"""Model, sequences -> [N] fp32 logprobs of the completions' tokens, differentiable."""


def grpo_step_case(
    shelf: ModelShelf, name: str, workload: Workload, *, micro_batch: int, rounds: int
) -> Case:
    """Time of a step with stock ops over that with canonical ones, and whose tokens drift."""
    return Case(
        work="GRPO step",
        shape={"model": name, **workload.shape, "micro_batch": micro_batch},
        run=partial(_grpo_step, shelf, name, workload, micro_batch, rounds),
    )


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of each phase, and the drift between rollout and training."""

    rollout: float
    training: float
    update: float
    drift: DriftReport

    @property
    def seconds(self) -> float:
        return self.rollout + self.training + self.update


def _grpo_step(
    shelf: ModelShelf, name: str, workload: Workload, micro_batch: int, rounds: int, bench: Bench
) -> dict[str, Any]:
    shelf.clear(bench.device)
    found: dict[Mode, list[StepTimes]] = {mode: [] for mode in MODES}
    try:
        with shelf.patched(name, bench.device) as model:
            model.train()
            stepper = _Stepper(model, workload, micro_batch, bench)
            for i in range(rounds + 1):
                for mode in MODES:
                    times = stepper.step(mode, i)
                    if i > 0:  # the first captures graphs and compiles kernels
                        found[mode].append(times)
            del stepper
    finally:
        shelf.clear(bench.device)  # its weights have been trained
    seconds = {mode: median(t.seconds for t in runs) for mode, runs in found.items()}
    tokens = workload.sequences * workload.longest
    figures = {
        f"{mode}/{phase}_seconds": median(getattr(t, phase) for t in runs)
        for mode, runs in found.items()
        for phase in ("rollout", "training", "update")
    }
    for mode, runs in found.items():
        figures[f"{mode}/tokens"] = sum(t.drift.tokens for t in runs)
        figures[f"{mode}/mismatched_tokens"] = sum(t.drift.mismatched_tokens for t in runs)
    return {
        "ours_us": seconds["strict"] * 1e6,
        "stock_us": seconds["stock"] * 1e6,
        "stock": "the same engine with stock ops, Hugging Face training",
        "ratio": seconds["stock"] / seconds["strict"],
        "tokens_per_second": {
            "ours": tokens / seconds["strict"],
            "stock": tokens / seconds["stock"],
        },
        "figures": figures,
    }


class _Stepper:
    """Takes steps of one policy, canonical or stock."""

    def __init__(self, model: Any, workload: Workload, micro_batch: int, bench: Bench) -> None:
        self._model = model
        self._workload = workload
        self._micro_batch = micro_batch
        self._bench = bench
        self._engine = engine_for(model, workload)
        self._optimizer = PolicyOptimizer(
            model,
            OptimizerSection(learning_rate=LEARNING_RATE),
            Accelerator(cpu=bench.device.type == "cpu", mixed_precision="no"),
            total_steps=100,
        )

    def step(self, mode: Mode, i: int) -> StepTimes:
        """Roll out, learn, update."""
        device = self._bench.device
        started = finished_seconds(device)
        sequences, old_logprobs = self._roll_out(mode, i)
        rolled_out = finished_seconds(device)
        score = partial(_scored, prompt_len=self._workload.prompt_len)
        if mode == "strict":
            logprobs = self._learn(score, sequences, old_logprobs)
        else:
            score = partial(stock_scored, new_tokens=self._workload.longest)
            with patched_session(self._model).stock():
                logprobs = self._learn(score, sequences, old_logprobs)
        trained = finished_seconds(device)
        self._optimizer.step()
        updated = finished_seconds(device)
        return StepTimes(
            rollout=rolled_out - started,
            training=trained - rolled_out,
            update=updated - trained,
            drift=compare_logprobs(torch.cat(old_logprobs), logprobs.cpu()),
        )

    def _roll_out(self, mode: Mode, i: int) -> tuple[list[list[int]], list[Tensor]]:
        workload, bench = self._workload, self._bench
        prompts = workload.prompts(f"grpo {mode} {i}", self._model.config.vocab_size)
        with strict(mode == "strict"):
            generation = timed_generation(
                self._engine, prompts, requests(workload.lengths()), bench.device, bench.deadline
            )
        completions = generation.completions
        sequences = [[*prompts[c.prompt_index], *c.token_ids] for c in completions]
        return sequences, [c.token_logprobs for c in completions]

    def _learn(
        self, score: Score, sequences: list[list[int]], old_logprobs: Sequence[Tensor]
    ) -> Tensor:
        """Gradients of the step; returns the [N] logprobs that training computed."""
        workload, size = self._workload, self._micro_batch
        rewards = [float(sequence[-1] % 2) for sequence in sequences]
        rewards[0] = 2.0  # no group structure may leave every advantage 0
        advantages = group_advantages(rewards, workload.group_size)
        found = []
        for first in range(0, len(sequences), size):
            part = slice(first, first + size)
            logprobs = score(self._model, sequences[part])
            lengths = [workload.longest] * len(sequences[part])
            ids = torch.arange(first, first + len(lengths))
            device = logprobs.device
            batch = TokenBatch(
                logprobs=logprobs,
                old_logprobs=torch.cat(list(old_logprobs[part])).to(device),
                advantages=per_token(advantages[part], lengths).to(device),
                sequence_ids=per_token(ids, lengths).to(device),
                lengths=lengths,
            )
            weights = token_weights(
                lengths,
                "dapo",
                total_tokens=workload.longest * len(sequences),
                device=device,
            )
            policy_loss(batch, weights, LossConfig()).loss.backward()
            found.append(logprobs.detach())
        return torch.cat(found)


def _scored(model: Any, sequences: list[list[int]], *, prompt_len: int) -> Tensor:
    return token_logprobs(model, sequences, prompt_lengths=[prompt_len] * len(sequences)).logprobs


def stock_scored(model: Any, sequences: list[list[int]], *, new_tokens: int) -> Tensor:
    """[N] logprobs of the last `new_tokens` of each sequence by the unpatched model; all sequences
    are as long, so there is neither padding nor a mask."""
    ids = torch.tensor(sequences, device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=new_tokens + 1).logits[:, :-1]
    logprobs = logits.float().log_softmax(dim=-1)
    return logprobs.gather(2, ids[:, -new_tokens:, None]).flatten()
