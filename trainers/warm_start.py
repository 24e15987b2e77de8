"""Supervised warm start: imitate the reference completions for a few steps, in canonical order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator

from rl_consistency.kernels.reduction.masked_reduction import masked_sum
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.trainers.config.learning_sections import OptimizerSection, WarmStartSection
from rl_consistency.trainers.data.examples import DataOrder
from rl_consistency.trainers.optimizer import PolicyOptimizer

Progress = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""


def warm_start(
    model: Any,
    prompts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    section: WarmStartSection,
    accelerator: Accelerator,
    *,
    seed: int,
    progress: Progress | None = None,
) -> float:
    """Train a patched policy on target tokens by maximum likelihood, mean over those of a batch.

    `prompts` and `targets` are token ids per example; only targets, end token included, are scored.
    `seed` is that of the data order. Returns the last step's loss.
    """
    settings = OptimizerSection(learning_rate=section.learning_rate, schedule="linear")
    optimizer = PolicyOptimizer(model, settings, accelerator, total_steps=section.steps)
    order = DataOrder(len(prompts), min(section.batch_size, len(prompts)), seed)
    loss_value = float("nan")
    for step in range(section.steps):
        chosen = sorted(order.batch(step))
        scored = token_logprobs(
            model,
            [[*prompts[i], *targets[i]] for i in chosen],
            prompt_lengths=[len(prompts[i]) for i in chosen],
        )
        loss = -masked_sum(scored.logprobs) / scored.logprobs.numel()
        accelerator.backward(loss)
        optimizer.step()
        loss_value = loss.item()
        if progress is not None:
            progress(step + 1, section.steps, loss_value)
    return loss_value
