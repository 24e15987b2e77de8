"""The typed batch that every loss reads, and the few numbers that shape the loss.

A batch is flat: one entry per *scored* token, sequence by sequence, positions ascending. It
holds no padding, so a loss has none to mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from rl_consistency.models.packing import from_host


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """The scored tokens of some sequences, in logical order.

    Every tensor is [N], N = ``sum(lengths)`` > 0, all on one device.

    Example: two completions, "7 7" (sample 4) and "9" (sample 5), rewarded 1 and 0, so that with
    Dr. GRPO their advantages are +0.5 and -0.5::

        TokenBatch(
            logprobs=tensor([-0.1, -0.2, -1.5], requires_grad=True),
            old_logprobs=tensor([-0.1, -0.2, -1.5]),
            advantages=tensor([0.5, 0.5, -0.5]),
            sequence_ids=tensor([4, 4, 5]),
            lengths=[2, 1],
        )

    Raises: TypeError on a dtype, ValueError on a shape, an order or an empty batch.
    """

    logprobs: Tensor
    """fp32, log pi(token) under the weights being trained; differentiable."""
    old_logprobs: Tensor
    """fp32, log pi(token) under the weights that sampled the token (the behaviour policy)."""
    advantages: Tensor
    """fp32, in GRPO the advantage of the token's sequence (see `per_token`); in PPO per token."""
    sequence_ids: Tensor
    """int64, the id of the token's sequence: one id per sequence, strictly ascending."""
    lengths: list[int]
    """Scored tokens of each sequence; a sequence may have none."""
    reference_logprobs: Tensor | None = None
    """fp32, log pi(token) under the frozen reference policy; needed for a KL term."""
    entropy: Tensor | None = None
    """fp32, entropy of the distribution the token was drawn from, nats; for an entropy bonus."""

    def __post_init__(self) -> None:
        if any(length < 0 for length in self.lengths):
            raise ValueError(f"lengths must not be negative, got {self.lengths}")
        if (tokens := sum(self.lengths)) == 0:
            raise ValueError("a TokenBatch needs at least one scored token, got none; skip it")
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor):
                continue
            dtype = torch.int64 if field.name == "sequence_ids" else torch.float32
            if value.dtype != dtype:
                raise TypeError(f"{field.name} must be {dtype}, got {value.dtype}")
            if (shape := value.shape) != (tokens,):
                raise ValueError(
                    f"{field.name} must be [sum(lengths) = {tokens}], got {list(shape)}"
                )
        ids = self.sequence_ids.tolist()
        filled = [length for length in self.lengths if length]
        starts = [0, *accumulate(filled)]
        firsts = [ids[start] for start in starts[:-1]]
        ascending = all(low < high for low, high in pairwise(firsts))
        if not ascending or any(len(set(ids[a:b])) != 1 for a, b in pairwise(starts)):
            raise ValueError(
                "sequence_ids must hold one id per sequence, strictly ascending; got first ids "
                f"{firsts[:8]} for lengths {filled[:8]}. Sort the sequences by sample id first"
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The shape of the clipped policy loss.

    Example: DAPO's clip-higher without a KL term is
    ``LossConfig(clip_low=0.2, clip_high=0.28)``: a token with a positive advantage stops pushing
    once its ratio exceeds 1.28, one with a negative advantage once its ratio is under 0.8.

    Raises: ValueError on a number outside its range.
    """

    clip_low: float = 0.2
    """The ratio is clipped from below at 1 - clip_low; 0 <= clip_low < 1."""
    clip_high: float = 0.2
    """The ratio is clipped from above at 1 + clip_high; clip_high >= 0."""
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference); >= 0."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; >= 0."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = 1.0 if field.name == "clip_low" else math.inf
            if not 0.0 <= value < limit:
                raise ValueError(f"{field.name} must be in [0, {limit}), got {value}")


def per_token(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[S] values, one per sequence -> [N], each repeated for its sequence's tokens; any dtype.

    Example: ``per_token(tensor([0.5, -0.5]), [2, 1])`` is ``[0.5, 0.5, -0.5]``.
    """
    if values.shape != (len(lengths),):
        raise ValueError(f"expected {len(lengths)} values, got a tensor {list(values.shape)}")
    # An index from the host: a count of repeats on a GPU would have to be read back first.
    index = np.repeat(np.arange(len(lengths)), lengths)
    return values[from_host(index, values.device)]
