"""Advantages from grouped rewards, and what becomes of completions that ran out of room.

Rewards are few, so everything is computed on the host in fp64 with correctly rounded sums
(`math.fsum`): no order of addition can enter, and the results are rounded to fp32 once.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo"]


def group_advantages(
    rewards: Sequence[float] | Tensor,
    group_size: int,
    *,
    kind: AdvantageKind = "grpo",
    eps: float = 1e-4,
) -> Tensor:
    """Advantages [S] fp32 of S rewards, laid out group by group, each group `group_size` long.

    grpo:    (reward - mean) / (std + eps), std the *sample* one (divisor group_size - 1)
    dr_grpo: reward - mean

    A group whose rewards are all equal gets exactly 0. Example: rewards 1, 0 in a group of two have
    mean 0.5 and sample std sqrt(0.5); dr_grpo gives +0.5 and -0.5, grpo +0.7070 and -0.7070.

    Raises: ValueError on an unknown kind, a group of one, no rewards or a number that groups do not
    divide, or a reward that is not finite (named).
    """
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"kind must be one of {list(get_args(AdvantageKind))}, got {kind!r}")
    values = [float(reward) for reward in rewards]
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2, got {group_size}: a group of one has only itself as "
            "baseline; sample more completions per prompt"
        )
    if not values or len(values) % group_size:
        raise ValueError(
            f"the rewards must be a positive multiple of group_size {group_size}, got {len(values)}"
        )
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"reward of sample {index} is {value}; rewards must be finite")
    groups = (values[i : i + group_size] for i in range(0, len(values), group_size))
    advantages = [value for group in groups for value in _center_and_scale(group, kind, eps)]
    return torch.tensor(advantages, dtype=torch.float32)


def _center_and_scale(group: list[float], kind: AdvantageKind, eps: float) -> list[float]:
    # The rounded mean of equal numbers need not be that number; no residue may pass for a signal.
    if min(group) == max(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    centered = [value - mean for value in group]
    if kind == "dr_grpo":
        return centered
    std = math.sqrt(math.fsum(value * value for value in centered) / (len(group) - 1))
    return [value / (std + eps) for value in centered]


def overlong_mask(finish_reasons: Sequence[str]) -> Tensor:
    """bool [S]: False for a completion cut by its length, which then gets zero weight (`keep`).

    Raises: ValueError on a finish reason other than "stop" or "length".
    """
    for index, reason in enumerate(finish_reasons):
        if reason not in ("stop", "length"):
            raise ValueError(f"sample {index} must end by 'stop' or 'length', got {reason!r}")
    return torch.tensor([reason == "stop" for reason in finish_reasons], dtype=torch.bool)


def overlong_penalty(lengths: Sequence[int], max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment [S] fp32, in [-1, 0], to be added to the rewards.

    0 up to max_tokens - buffer tokens, falling linearly to -1 at max_tokens and staying there.
    Example: with max_tokens 20 and buffer 4, completions of 16, 17, 20 tokens get 0, -0.25, -1.

    Raises: ValueError unless 0 < buffer <= max_tokens and no length is negative.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be in 1..max_tokens ({max_tokens}), got {buffer}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {list(lengths)}")
    free = max_tokens - buffer
    penalties = [-min(max(length - free, 0) / buffer, 1.0) + 0.0 for length in lengths]
    return torch.tensor(penalties, dtype=torch.float32)
