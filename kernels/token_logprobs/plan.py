"""How one call of `token_logprobs` runs on CUDA: its chunks, its schedules, and whether backward
reuses the first chunk's logits. No plan changes a bit; a test compares several.

State: `KeptLogits` refers to the kept logits of at most one call in the process. They take the
memory that the LM head's fp32 gradient takes later; keeping more would raise the peak.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.schedules import UNFUSED, pick

TRUNCATED_SHARE = 4
"""The factor by which chunks shrink if a row truncates: backward then writes 8 bytes of logits and
2 of gradient per vocabulary entry, not just the 2."""
STATISTICS_CHUNK = 8192
"""Rows of one fused forward product; its block statistics take V/10 bytes a row."""
KEPT_WIDTH = 3072
"""The hidden size from which writing and reading a logit is faster than computing it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one call runs on CUDA; neutral to the bits."""

    chunk_tokens: int  # rows whose logits or logit gradients exist at one time
    statistics: str  # name in `STATISTICS_SCHEDULES`, or `UNFUSED`
    gradient: str  # name in `GRADIENT_SCHEDULES`, or `UNFUSED`
    keeps_logits: bool = False  # whether the first chunk's logits wait for backward

    @property
    def forward_chunk(self) -> int:
        """Rows of one forward product."""
        return self.chunk_tokens if self.statistics == UNFUSED else STATISTICS_CHUNK


def choose_plan(
    hidden: Tensor, weight: Tensor, rows: SamplingRows, chunk_tokens: int | None = None
) -> Plan:
    """The plan for one call: fused unless a row truncates or operands are fp32. What a chunk writes
    is about half the size of the LM head's fp32 gradient."""
    # Both answers are read here: rows selected later keep them without another copy.
    truncates, _ = rows.truncates, rows.unit_temperature
    wanted = weight.shape[1] // TRUNCATED_SHARE if truncates else weight.shape[1]
    chunk_tokens = chunk_tokens or max(128, wanted // 128 * 128)
    if truncates:
        return Plan(chunk_tokens=chunk_tokens, statistics=UNFUSED, gradient=UNFUSED)
    count = hidden.shape[0]
    return Plan(
        chunk_tokens=chunk_tokens,
        statistics=pick(hidden, weight, "statistics", min(count, STATISTICS_CHUNK)),
        gradient=pick(hidden, weight, "gradient", min(count, chunk_tokens)),
    )


class KeptLogits:
    """The logits that wait for a backward pass."""

    _logits: weakref.ref[Tensor] | None = None

    @classmethod
    def note(cls, logits: Tensor) -> None:
        """Remember logits that a graph keeps."""
        cls._logits = weakref.ref(logits)

    @classmethod
    def exist(cls) -> bool:
        """Whether the latest noted logits are still in memory."""
        return cls._logits is not None and cls._logits() is not None


def keeps_logits(
    weight: Tensor, rows: SamplingRows, plan: Plan, weight_grad: GradientBuffer | None
) -> bool:
    """Whether keeping a chunk's logits saves time without a higher peak of memory: a gradient at
    least as large must be allocated after they are freed."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and max(KEPT_WIDTH, plan.chunk_tokens) <= weight.shape[1]
        and (weight_grad is None or weight_grad.parameter.grad is None)
        and not rows.truncates
        and not KeptLogits.exist()
    )
