"""Triton schedule of the RMSNorm backward for narrow rows, many of a token (q/k-norm).

Shapes, dtypes, order, invariance: those of `rms_norm`; its bytes are those of the kernel in
    `rms_norm_triton`, which takes what this one does not (`fits`).
Errors: none.
Cost: memory-bound. Reads dy, x (and the sum's gradient) and writes dx, and 1/16 of an fp32 row per
    token for dweight.

One program takes one step of the fold, all its eight chunks (pairs of tokens) side by side: chunks
lie over lanes and warps, rows of a chunk over registers. So terms of dweight add up in one thread,
and warps exchange sums once a step. A chunk's rows, filled up to ROWS * SPLIT, a power of two, come
in SPLIT parts: row r * SPLIT + part of every chunk c is row 8 * r + c of a tile [8 * ROWS, BLOCK_H].
"""

# Pyright does not know what a kernel's constexpr arguments and loops are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.gradient_fold import STEP
from rl_consistency.kernels.rms_norm_schedules import (
    NARROW,
    NarrowSchedule,
    block_width,
    chunk_rows,
)
from rl_consistency.kernels.row_tree_triton import mean_of, row_tree

Rows = tuple[Tensor, int, int, int]
"""A tensor as rows [outer, INNER, H]: (tensor, outer stride, inner stride, INNER)."""


@triton.jit
def _load_tile(source, step, chunk, within, inside, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rows `within` of the step's chunks, in any layout that `fits`: [8 * ROWS, BLOCK_H]."""
    pointer, outer, inner, INNER: tl.constexpr = source
    start = pointer + step.to(tl.int64) * (16 * HEADS // INNER) * outer
    if INNER == 1:
        offsets = (chunk * (2 * HEADS) + within) * outer
    else:
        offsets = (chunk * 2 + within // HEADS) * outer + within % HEADS * inner
    column = tl.arange(0, BLOCK_H)
    return tl.load(start + offsets[:, None] + column[None, :], mask=inside, other=0.0)
