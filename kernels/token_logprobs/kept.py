"""Logits that wait for the backward pass of `token_logprobs` instead of being computed again.

They lie in the room that the LM head's fp32 gradient is allocated in afterwards; to keep more than
one chunk of one call would raise the peak of memory. Kept or not, the bytes are the same.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from rl_consistency.kernels.gradient_fold.op import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.plan import Plan

KEPT_WIDTH = 3072
"""Hidden size from which a logit is written and read back in less time than it is computed in."""


class Waiting:
    """The logits that wait for a backward pass: at most one call's in the process."""

    _logits: weakref.ref[Tensor] | None = None

    @classmethod
    def hold(cls, logits: Tensor) -> None:
        """Take note of logits that a graph keeps."""
        cls._logits = weakref.ref(logits)

    @classmethod
    def any(cls) -> bool:
        """Whether some are still in memory."""
        return cls._logits is not None and cls._logits() is not None


def keeps_logits(
    weight: Tensor, rows: SamplingRows, plan: Plan, weight_grad: GradientBuffer | None
) -> bool:
    """Whether keeping a chunk's logits saves time and leaves the peak of memory where it is: a
    gradient at least as large has to be allocated after they have been freed."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and max(KEPT_WIDTH, plan.chunk_tokens) <= weight.shape[1]
        and (weight_grad is None or weight_grad.parameter.grad is None)
        and not rows.truncates
        and not Waiting.any()
    )
