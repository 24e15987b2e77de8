"""Advantages from rewards, and what becomes of completions that ran out of room.

Everything is computed on the host in fp64, and the results are rounded to fp32 once. Sums over
samples or tokens are correctly rounded (`math.fsum`): no order of addition can enter. The sum along
a sequence runs from its last token to its first.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

GroupKind = Literal["grpo", "dr_grpo", "rloo"]
AdvantageKind = Literal[GroupKind, "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
"""As verl names them."""


def group_advantages(
    rewards: Sequence[float] | Tensor,
    group_size: int,
    *,
    kind: GroupKind = "grpo",
    eps: float = 1e-4,
) -> Tensor:
    """Advantages [S] fp32 of S rewards, laid out group by group, each group `group_size` long.

    grpo:    (reward - mean) / (std + eps), std the *sample* one (divisor group_size - 1)
    dr_grpo: reward - mean
    rloo:    reward - mean of the others (leave one out; Ahmadian et al., arXiv 2402.14740)

    A NaN is no reward: its advantage is 0, and mean and std are those of the others.
    A group whose rewards are all equal gets exactly 0. Example: rewards 1, 0 in a group of two have
    mean 0.5 and sample std sqrt(0.5); dr_grpo gives +0.5 and -0.5, grpo +0.7070 and -0.7070, rloo
    +1 and -1.

    Raises: ValueError on a group of one, or a number of rewards that groups do not divide.
    """
    centred = _centred(rewards, group_size, kind, eps)
    return torch.tensor(centred, dtype=torch.float32)


def _centred(
    rewards: Sequence[float] | Tensor, group_size: int, kind: GroupKind, eps: float = 1e-4
) -> list[float]:
    values = [float(reward) for reward in rewards]
    if group_size < 2:
        remedy = "a group of one has no baseline; sample more completions per prompt"
        raise ValueError(f"group_size must be at least 2, got {group_size}: {remedy}")
    if not values or len(values) % group_size:
        needed = f"a positive multiple of group_size {group_size}"
        raise ValueError(f"the rewards must be {needed}, got {len(values)}")
    advantages: list[float] = []
    for first in range(0, len(values), group_size):
        group = values[first : first + group_size]
        rewarded = [value for value in group if not math.isnan(value)] or [0.0]
        mean = math.fsum(rewarded) / len(rewarded)
        # The rounded mean of equal numbers need not be that number; no residue may be a signal.
        equal = min(rewarded) == max(rewarded)
        centered = [0.0 if equal or math.isnan(value) else value - mean for value in group]
        if kind == "rloo" and not equal:
            others = [math.fsum([*rewarded, -value]) / (len(rewarded) - 1) for value in group]
            pairs = zip(group, others)
            centered = [0.0 if math.isnan(value) else value - mean for value, mean in pairs]
        if kind == "grpo" and not equal:
            std = math.sqrt(math.fsum(value * value for value in centered) / (len(rewarded) - 1))
            centered = [value / (std + eps) for value in centered]
        advantages += centered
    return advantages


def equal_groups(rewards: Tensor, group_size: int) -> Tensor:
    """bool [groups] from [S], True where all rewards but NaN are equal: advantages are then 0."""
    groups = rewards.view(-1, group_size)
    least, most = (torch.where(groups.isnan(), at, groups) for at in (math.inf, -math.inf))
    return least.amin(dim=1) >= most.amax(dim=1)


def token_advantages(
    kind: AdvantageKind,
    rewards: Sequence[float] | Tensor,
    group_size: int,
    lengths: Sequence[int],
    *,
    kl: Sequence[Sequence[float]] | None = None,
    coefficient: float = 0.0,
) -> list[Tensor]:
    """The advantages of each completion's tokens, fp32, `lengths` long, from S rewards in groups.

    grpo, dr_grpo, rloo:          `group_advantages`, equal for all tokens of a completion
    reinforce_plus_plus:          what a token and those after it earn, `whitened` over all tokens
    reinforce_plus_plus_baseline: reward - mean of the group, `whitened` over all tokens

    With `kl`, logprob - reference_logprob of each token, a token earns `coefficient` times that
    less; where advantages are not of tokens, a completion earns the sum of it less.
    A NaN is no reward: all advantages of that completion are 0, and others do not depend on it.
    Source: REINFORCE++ (arXiv 2501.03262, equations 3 to 5).

    Raises: ValueError as `group_advantages` does, but for reinforce_plus_plus, which has no groups.
    """
    values = [float(reward) for reward in rewards]
    if kind == "reinforce_plus_plus":
        shares = kl or [[0.0] * length for length in lengths]
        given = [token_rewards(v, part, coefficient) for v, part in zip(values, shares)]
        returns = [
            generalized_advantages(earned, [0.0] * len(earned), gamma=1.0, gae_lambda=1.0)
            for earned, value in zip(given, values)
            if not math.isnan(value)
        ]
        return _whitened_where_rewarded(values, lengths, returns)
    if kl is not None:
        values = [v - coefficient * math.fsum(part) for v, part in zip(values, kl, strict=True)]
    if kind == "reinforce_plus_plus_baseline":
        triples = zip(_centred(values, group_size, "dr_grpo"), values, lengths, strict=True)
        parts = [[centred] * n for centred, value, n in triples if not math.isnan(value)]
        return _whitened_where_rewarded(values, lengths, parts)
    advantages = group_advantages(values, group_size, kind=kind)
    return [value.repeat(n) for value, n in zip(advantages, lengths, strict=True)]


def _whitened_where_rewarded(
    rewards: Sequence[float], lengths: Sequence[int], parts: Sequence[Sequence[float]]
) -> list[Tensor]:
    """`parts`, of the completions that have a reward, whitened, and zeros of the others."""
    found = iter(whitened(parts) if parts else [])
    pairs = zip(rewards, lengths, strict=True)
    each = [[0.0] * length if math.isnan(reward) else next(found) for reward, length in pairs]
    return [torch.tensor(part, dtype=torch.float32) for part in each]


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, gae_lambda: float
) -> list[float]:
    """Advantages of the tokens of one completion, in fp64 (GAE; Schulman et al., 2016).

        delta[t] = rewards[t] + gamma * values[t + 1] - values[t]
        advantage[t] = delta[t] + gamma * gae_lambda * advantage[t + 1]

    After the last token value and advantage are 0, also where the completion was cut.

    Example: rewards 0, 1 and values 0.25, 0.5 with gamma 1, gae_lambda 0.5 have deltas 0.25 and
    0.5, so advantages 0.5 and 0.5.

    Raises: ValueError on lengths that differ, or a value that is not finite.
    """
    for index, pair in enumerate(zip(rewards, values, strict=True)):
        if not all(map(math.isfinite, pair)):
            raise ValueError(f"reward and value of token {index} are {pair}; they must be finite")
    advantages: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * advantage
        advantages.append(advantage)
        next_value = value
    return advantages[::-1]


def token_rewards(reward: float, kl: Sequence[float], coefficient: float) -> list[float]:
    """What each token of a completion earns: `reward` at the last, less its share of the KL.

    `kl` is logprob - reference_logprob of each token, `coefficient` its weight.
    """
    rewards = [-coefficient * value for value in kl]
    return [*rewards[:-1], rewards[-1] + reward]


def explained_variance(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]
) -> float:
    """1 - Var(returns - values) / Var(returns) over all tokens; 0 for returns that are all equal.

    1 is a perfect critic, 0 one that knows the mean only; a worse one is negative.
    """
    found = [pair for parts in zip(values, returns, strict=True) for pair in zip(*parts)]
    spread = _variance([r for _, r in found])
    return 1.0 - _variance([r - v for v, r in found]) / spread if spread else 0.0


def _variance(values: Sequence[float]) -> float:
    if min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)


def whitened(advantages: Sequence[Sequence[float]], *, eps: float = 1e-8) -> list[list[float]]:
    """The advantages of all tokens of a batch with mean 0 and standard deviation 1, in fp64.

    Equal advantages become exactly 0.
    """
    flat = [value for part in advantages for value in part]
    if min(flat) == max(flat):  # the rounded mean need not be that number
        return [[0.0] * len(part) for part in advantages]
    mean, deviation = math.fsum(flat) / len(flat), math.sqrt(_variance(flat))
    return [[(value - mean) / (deviation + eps) for value in part] for part in advantages]


def overlong_mask(finish_reasons: Sequence[str]) -> Tensor:
    """bool [S]: False for a completion cut by its length, which then gets zero weight (`keep`)."""
    return torch.tensor([reason == "stop" for reason in finish_reasons], dtype=torch.bool)


def overlong_penalty(lengths: Sequence[int], max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment [S] fp64, in [-1, 0], to be added to the rewards.

    0 up to max_tokens - buffer tokens, falling linearly to -1 at max_tokens and staying there.
    Example: with max_tokens 20 and buffer 4, completions of 16, 17, 20 tokens get 0, -0.25, -1.
    """
    free = max_tokens - buffer
    penalties = [-min(max(length - free, 0) / buffer, 1.0) + 0.0 for length in lengths]
    return torch.tensor(penalties, dtype=torch.float64)
