"""Schedules of the experts on CUDA, and which one a call gets; all give the same bytes.

The host does not know how many rows an expert has. So a pick goes by the number of pairs and of
experts, as if routing were even.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_consistency.kernels.core.matrix_step import FP32_STEP
from rl_consistency.kernels.gradient_fold.schedules import POINTER as FOLDS
from rl_consistency.kernels.gradient_fold.schedules import WIDE as FOLDS_FP32
from rl_consistency.kernels.gradient_fold.schedules import Schedule as FoldSchedule
from rl_consistency.kernels.matmul.schedules import Schedule

PRODUCTS = tuple(
    map(
        Schedule.named,
        (
            "pointer-16x64x128-w4-s4",
            "pointer-32x64x128-w4-s4",
            "pointer-64x128x64-w4-s4",
            "pointer-128x128x64-w8-s3",
        ),
    )
)
"""For bf16 and fp16, by the rows of a tile."""

GATE_UP = tuple(
    map(
        Schedule.named,
        (
            "pointer-16x32x128-w4-s4",
            "pointer-32x32x128-w4-s4",
            "pointer-64x64x64-w4-s4",
            "pointer-128x64x64-w8-s3",
        ),
    )
)
"""The same for gate and up: two weight tiles per stage."""

PRODUCTS_FP32 = tuple(Schedule.named(f"pointer-{m}x32x{FP32_STEP}-w4-s3") for m in (16, 32, 64))
"""For both in fp32."""


@dataclass(frozen=True)
class RowSchedule:
    """How programs take rows; it changes no bit."""

    block: int
    """Columns of a program; where a program holds a whole row, unused."""
    warps: int


COMBINE = (RowSchedule(512, 2), RowSchedule(1024, 4), RowSchedule(2048, 4), RowSchedule(4096, 8))
PAIR = (RowSchedule(0, 1), RowSchedule(0, 4), RowSchedule(0, 8), RowSchedule(0, 16))
"""Schedules of the row's sum and of a pair's gradient, to time and to compare."""

COUNTED = 4096
"""Elements of the table of rows and experts that a program of `pairs_triton` holds."""

FEW_ROWS = 256
"""Rows up to which a row's sum is shared by several programs."""


LIBRARY_PAIRS = 256
"""Pairs of each expert from which the library is preferred. With fewer, reading the weights takes
most of the time, and our own products save the copy of x and the pass over gate and up."""


def block_experts(experts: int) -> int:
    """The next power of two; all experts stand in one vector."""
    return max(1 << (experts - 1).bit_length(), 2)


def block_rows(experts: int) -> int:
    """Rows whose pairs one program counts."""
    return min(max(COUNTED // block_experts(experts), 16), 64)


def most_tiles(pairs: int, experts: int, block: int) -> int:
    """Tiles of `block` pairs for every routing: each expert may have a tile that is not full."""
    return min(pairs, pairs // block + experts)


def product_candidates(dtype: torch.dtype, *, gate_up: bool) -> tuple[Schedule, ...]:
    """All schedules of a product, few rows first."""
    if dtype == torch.float32:
        return PRODUCTS_FP32
    return GATE_UP if gate_up else PRODUCTS


def pick_product(
    pairs: int, experts: int, n: int, dtype: torch.dtype, *, gate_up: bool = False
) -> Schedule:
    """The schedule for so many pairs and n columns."""
    own = product_candidates(dtype, gate_up=gate_up)
    each = -(-pairs // experts)
    # Half a tile of filler per expert costs less than another pass over its weights.
    fitting = [s for s in own if s.block_m >= each]
    return fitting[0] if fitting else own[-1]


def prefers_library(pairs: int, experts: int, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product is expected to be faster. Only a certificate admits it."""
    return dtype == torch.bfloat16 and pairs >= LIBRARY_PAIRS * experts


def fold_candidates(dtype: torch.dtype) -> tuple[FoldSchedule, ...]:
    """All schedules of the fold over runs."""
    return FOLDS_FP32 if dtype == torch.float32 else FOLDS


def pick_fold(steps: int, n: int, k: int, dtype: torch.dtype) -> FoldSchedule:
    """The schedule for an [n, k] gradient of each expert."""
    own = fold_candidates(dtype)
    fitting = [s for s in own if s.block_n <= n and s.block_k <= k]
    return fitting[0] if fitting else own[-1]


def pick_combine(rows: int, hidden: int) -> RowSchedule:
    """The schedule of a row's sum."""
    if rows <= FEW_ROWS:
        return COMBINE[0]
    return COMBINE[1] if hidden <= 1024 else COMBINE[2]


def pick_pair(width: int) -> RowSchedule:
    """The schedule of a pair's gradient, whose row is `width` wide."""
    warps = min(max(block_experts(width) // 512, 1), 16)
    return next(s for s in PAIR if s.warps >= warps)
