"""What an algorithm learns from, and what people read of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from statistics import fmean, stdev
from typing import Any

from torch import Tensor

from rl_consistency.rollout.completion import Completion
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.hooks import Rollout
from rl_consistency.trainers.rewards import Rewards, known


@dataclass(kw_only=True)
class Experience(Rollout):
    """One rollout batch to learn from; everything is indexed by sample, in logical order."""

    keep: Tensor | None = None
    """[S] bool, False where a sample is left out of the loss; None keeps all."""
    reference_logprobs: list[Tensor] | None = None
    """Logprobs of the reference model, on the model's device."""
    advantages: Sequence[Tensor] = ()
    """fp32, of each token, on the CPU; the algorithm gives them, and in PPO the next two."""
    values: Sequence[Tensor] = ()
    """What the critic expected."""
    returns: Sequence[Tensor] = ()
    """What came."""

    @cached_property
    def lengths(self) -> list[int]:
        """Completion tokens of each sample."""
        return [len(t) for t in self.logprobs]

    def kl(self) -> list[list[float]] | None:
        """logprob - reference_logprob of each token, in fp64; None without a reference."""
        if self.reference_logprobs is None:
            return None
        pairs = zip(self.logprobs, self.reference_logprobs, strict=True)
        return [(own.double() - other.cpu().double()).tolist() for own, other in pairs]


def rollout_metrics(
    completions: Sequence[Completion], rewards: Rewards
) -> dict[str, float | int | str | bool]:
    """What is logged of a rollout's completions and their rewards."""
    lengths = [len(c.token_ids) for c in completions]
    cut = sum(c.finish_reason == "length" for c in completions)
    total = known(rewards.total)
    columns = {"mean": total} | {name: known(each) for name, each in rewards.by_function.items()}
    return {
        **{f"reward/{name}": fmean(values) for name, values in columns.items() if values},
        "reward/std": stdev(total) if len(total) > 1 else 0.0,
        "completion/length_mean": fmean(lengths),
        "completion/length_max": max(lengths),
        "completion/cut_fraction": cut / len(completions),
    }


def samples_of(
    examples: Sequence[Example],
    completions: Sequence[Completion],
    rewards: Rewards,
    texts: Callable[[Sequence[Completion]], list[str]],
    *,
    n: int,
    count: int,
) -> list[dict[str, Any]]:
    """`count` completions of a rollout: of each group of `n` in turn the best, then the worst.

    Of two with equal rewards the earlier counts as the better one; one without is the worst.
    """
    total = rewards.total
    ranked = [
        sorted(range(first, first + n), key=lambda i: (isnan(total[i]), -total[i]))
        for first in range(0, len(completions), n)
    ]
    chosen = [i for group in ranked for i in dict.fromkeys((group[0], group[-1]))][:count]
    decoded = texts([completions[i] for i in chosen]) if chosen else []  # of none some give one
    return [
        {
            "prompt": examples[i].prompt,
            "completion": text,
            "answer": examples[i].answer,
            "reward": None if isnan(total[i]) else total[i],
            "rewards": {name: scores[i] for name, scores in rewards.by_function.items()},
            "tokens": len(completions[i].token_ids),
            "finish_reason": completions[i].finish_reason,
        }
        for i, text in zip(chosen, decoded, strict=True)
    ]
