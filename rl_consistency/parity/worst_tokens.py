"""The tokens whose logprobs differ most between rollout and training, as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_consistency.parity.drift import ordered_integers

MOST = 50
"""Rows of a table."""


class WorstToken(NamedTuple):
    """One token that differs; a row."""

    token: str
    prompt_id: int
    sample: int
    """Which completion of its prompt."""
    position: int
    """Place of the token in the completion, counted from 0."""
    rollout_logprob: float
    training_logprob: float
    difference: float
    """training - rollout, nats."""


def worst_tokens(
    completions: Sequence[Sequence[int]],
    places: Sequence[tuple[int, int]],
    rollout: Sequence[Tensor],
    training: Sequence[Tensor],
    decode: Callable[[list[int]], str],
    *,
    most: int = MOST,
) -> list[WorstToken]:
    """The tokens whose bits differ, the largest |difference| first, what is not finite before it.

    Args:
        completions: token ids of each completion.
        places: prompt id and sample of each.
        rollout, training: [completion length] fp32 of each.
        decode: the text of token ids.
    """
    found: list[tuple[float, int, int]] = []
    for index, pair in enumerate(zip(rollout, training, strict=True)):
        ours, theirs = (side.detach().float().cpu() for side in pair)
        differs = ordered_integers(ours) != ordered_integers(theirs)
        differs |= ~(ours.isfinite() & theirs.isfinite())
        size = (theirs.double() - ours.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        at = differs.nonzero().squeeze(1)
        largest = at[torch.argsort(size[at], descending=True, stable=True)[:most]]
        found += [(-float(size[i]), index, int(i)) for i in largest]
    rows = []
    for _, index, position in sorted(found)[:most]:
        a, b = float(rollout[index][position]), float(training[index][position])
        token = decode([completions[index][position]])
        rows.append(WorstToken(token, *places[index], position, a, b, b - a))
    return rows
