"""How one call of `token_logprobs` runs on CUDA: its chunks of rows and which schedules they take.

A plan changes no bit; a test runs several and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.schedules import (
    GRADIENT_SCHEDULES,
    STATISTICS_SCHEDULES,
    UNFUSED,
    pick,
)

TRUNCATED_SHARE = 4
"""One in so many rows of a fused plan's chunk: backward writes 8 bytes of logits and 2 of gradient
per vocabulary entry where a row truncates, and those 2 alone in a fused plan."""

STATISTICS_CHUNK = 8192
"""Rows of one fused forward product; its block statistics take V/10 bytes a row."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one call runs on CUDA; neutral to the bits."""

    chunk_tokens: int
    """Rows whose logits or logit gradients exist at one time."""
    statistics: int
    """Index of `STATISTICS_SCHEDULES`, or `UNFUSED`."""
    gradient: int
    """Index of `GRADIENT_SCHEDULES`, or `UNFUSED`."""
    keeps_logits: bool = False
    """Whether the first chunk's logits wait in memory for the backward pass."""

    @property
    def forward_chunk(self) -> int:
        """Rows of one forward product."""
        return self.chunk_tokens if self.statistics == UNFUSED else STATISTICS_CHUNK


def choose_plan(
    hidden: Tensor, weight: Tensor, rows: SamplingRows, chunk_tokens: int | None = None
) -> Plan:
    """The plan for one call: fused unless a row truncates, chunks that keep what is written for
    them to about half the size of the LM head's fp32 gradient."""
    # Asked of all rows at once: what is selected from them later asks the device nothing more.
    truncates, _ = rows.truncates, rows.unit_temperature
    wanted = weight.shape[1] // TRUNCATED_SHARE if truncates else weight.shape[1]
    chunk_tokens = chunk_tokens or max(128, wanted // 128 * 128)
    if truncates:
        return Plan(chunk_tokens=chunk_tokens, statistics=UNFUSED, gradient=UNFUSED)
    return Plan(
        chunk_tokens=chunk_tokens,
        statistics=pick(STATISTICS_SCHEDULES, hidden, weight),
        gradient=pick(GRADIENT_SCHEDULES, hidden, weight),
    )
