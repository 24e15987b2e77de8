"""Supervised warm start: imitate the reference completions for a few steps, in canonical order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_consistency.kernels.reduction.sums import masked_sum
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.trainers.config.learning_sections import OptimizerSection, WarmStartSection
from rl_consistency.trainers.data.examples import DataOrder, Parts
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.strategy import Strategy


def warm_start(
    prompts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    section: WarmStartSection,
    ranks: Strategy,
    *,
    seed: int,
    parts: Parts = (),
    announce: Callable[[str], None] = lambda line: None,
) -> float:
    """Train a patched policy on target tokens by maximum likelihood, mean over those of a batch.

    `prompts` and `targets` are token ids per example; only targets, end token included, are scored.
    `ranks` have the policy and share the examples of a batch. `seed` and `parts` are those of the
    data order. `announce` is told when another fifth of the steps is done. Returns the last
    step's loss.
    """
    settings = OptimizerSection(learning_rate=section.learning_rate, schedule="linear")
    optimizer = PolicyOptimizer(ranks, settings, total_steps=section.steps)
    order = DataOrder(len(prompts), min(section.batch_size, len(prompts)), seed, parts=parts)
    loss_value = float("nan")

    def accumulate(chosen: list[int]) -> tuple[float, float]:
        """The norm of one step's gradients, and its loss."""
        num_tokens = sum(len(targets[i]) for i in chosen)
        logprobs: dict[int, Tensor] = {}

        def backward(batch: range, is_filler: bool) -> None:
            part = [chosen[i] for i in batch]
            scored = token_logprobs(
                ranks.model,
                [[*prompts[i], *targets[i]] for i in part],
                prompt_lengths=[len(prompts[i]) for i in part],
            )
            loss = -masked_sum(scored.logprobs) / num_tokens
            ranks.backward(loss * 0.0 if is_filler else loss)
            if not is_filler:
                logprobs[batch.start] = scored.logprobs.detach()

        norm = ranks.accumulate(len(chosen), None, backward)
        all_logprobs = torch.cat(ranks.shared_tensors("logprobs of the warm start", logprobs))
        return norm, (-masked_sum(all_logprobs) / num_tokens).item()

    for step in range(section.steps):
        norm, loss_value = accumulate(sorted(order.batch(step)))
        optimizer.step(norm)
        if (step + 1) % max(section.steps // 5, 1) == 0:
            announce(f"warm start {step + 1}/{section.steps}: loss {loss_value:.3f}")
    return loss_value
