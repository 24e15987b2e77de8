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
    """Train on target tokens by maximum likelihood, mean over the tokens of a batch.

    Args:
        model: patched policy, updated in place.
        prompts: token ids of each example's prompt; not scored.
        targets: token ids of each example's completion, end token included.
        section: steps, batch size, learning rate.
        accelerator: prepares the optimizer and runs backward.
        seed: of the data order.
        progress: called after each step.

    Returns:
        The last step's loss.
    """
    optimizer = PolicyOptimizer(
        model,
        OptimizerSection(learning_rate=section.learning_rate, schedule="linear"),
        accelerator,
        total_steps=section.steps,
    )
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
