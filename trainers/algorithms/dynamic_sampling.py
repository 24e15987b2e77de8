"""Dynamic sampling: a step learns from groups whose rewards differ, drawn until there are enough.

Which groups are kept is a function of their rewards, which are the same on all ranks.
Source: Yu et al., DAPO (arXiv 2503.14476, section 3.2); verl calls it `filter_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from rl_consistency.rollout.completion import Completion
from rl_consistency.trainers.advantages import equal_groups
from rl_consistency.trainers.hooks import Metrics
from rl_consistency.trainers.rewards import Rewards, known


class Drawn(NamedTuple):
    """Samples group by group, each group of one prompt."""

    index: list[int]
    """Place of each sample's prompt in the training set."""
    completions: list[Completion]
    rewards: Rewards
    shaped: Tensor
    """[S] fp64, the rewards that advantages are made of."""

    def followed_by(self, other: Drawn) -> Drawn:
        """These samples and those of another batch."""
        shaped = torch.cat([self.shaped, other.shaped])
        rewards = self.rewards.followed_by(other.rewards)
        both = self.index + other.index, self.completions + other.completions
        return Drawn(*both, rewards, shaped)

    def taken(self, samples: Sequence[int]) -> Drawn:
        """These samples, in this order."""
        return Drawn(
            [self.index[i] for i in samples],
            [self.completions[i] for i in samples],
            self.rewards.taken(samples),
            self.shaped[list(samples)],
        )


def fill_batch(
    draw: Callable[[int], Drawn], groups: int, group_size: int, max_rounds: int
) -> tuple[Drawn, int, Metrics]:
    """The first `groups` groups of unequal rewards that the rounds give, in the order drawn; the
    number of rounds, and what is logged of them.

    `draw(round)` gives the rollout batch of a round, counted from 0. What is missing after
    `max_rounds` is filled up with the groups of equal rewards that were drawn first.
    """
    drawn: Drawn | None = None
    kept: list[int] = []
    equal: list[int] = []
    rounds = 0
    while rounds < max_rounds and len(kept) < groups:
        new = draw(rounds)
        rounds, drawn = rounds + 1, new if drawn is None else drawn.followed_by(new)
        same = equal_groups(drawn.shaped, group_size).tolist()
        kept = [group for group, is_equal in enumerate(same) if not is_equal]
        equal = [group for group, is_equal in enumerate(same) if is_equal]
    assert drawn is not None
    missing = max(groups - len(kept), 0)
    chosen = [*kept[:groups], *equal[:missing]]
    samples = [group * group_size + i for group in chosen for i in range(group_size)]
    metrics: Metrics = {
        "dynamic_sampling/rounds": rounds,
        "dynamic_sampling/dropped_groups": len(equal) - missing,
        "dynamic_sampling/filled_groups": missing,
    }
    if rewards := known(drawn.rewards.total):
        metrics["dynamic_sampling/reward_mean"] = fmean(rewards)
    return drawn.taken(samples), rounds, metrics
