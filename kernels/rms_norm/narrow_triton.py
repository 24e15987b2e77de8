"""Triton schedule of the RMSNorm backward for narrow rows, many of a token (q/k-norm).

Shapes, dtypes, order, invariance: those of `rms_norm`; its bytes are those of the kernel in
    `rms_norm_triton`, which takes what this one does not (`fits`).
Errors: none.
Cost: memory-bound. Reads dy, x (and the sum's gradient) and writes dx, and 1/16 of an fp32 row per
    token for dweight.

One program takes one step of the fold, all its eight chunks (pairs of tokens) side by side: chunks
lie over lanes and warps, rows of a chunk over registers. So terms of dweight add up in one thread,
and warps exchange sums once a step. A chunk's rows, filled up to ROWS * SPLIT, a power of two, come
in SPLIT parts: row 8 * r + c of a part's tile [8 * ROWS, BLOCK_H] is row r * SPLIT + part of the
chunk c.
"""

# Pyright does not know what a kernel's constexpr arguments and loops are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.rms_norm.row_tree_triton import mean_of, row_tree
from rl_consistency.kernels.rms_norm.schedules import (
    NARROW,
    NarrowSchedule,
    block_width,
    chunk_rows,
)

Rows = tuple[Tensor, int, int, int]
"""A tensor as rows [outer, INNER, H]: (tensor, outer stride, inner stride, INNER)."""


@triton.jit
def _load_tile(source, step, chunk, within, inside, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rows `within` of the step's chunks of a source (pointer, strides, INNER)."""
    pointer, outer, inner, INNER = source
    start = pointer + step.to(tl.int64) * (16 * HEADS // INNER) * outer
    if INNER == 1:
        offsets = (chunk * (2 * HEADS) + within) * outer
    else:
        offsets = (chunk * 2 + within // HEADS) * outer + within % HEADS * inner
    column = tl.arange(0, BLOCK_H)
    return tl.load(start + offsets[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _part(dy, x, dtotal, weight, rstd_ptr, dx_ptr, step, part, num_rows, H: tl.constexpr,
          HEADS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
          BLOCK_H: tl.constexpr):  # fmt: skip
    """Store dx of a part; the eight chunks' terms of dweight, one after another [8 * BLOCK_H]."""
    index = tl.arange(0, 8 * ROWS)
    chunk, within = index % 8, index // 8 * SPLIT + part
    in_step = chunk * (2 * HEADS) + within
    row = step * (16 * HEADS) + in_step
    valid = (within < 2 * HEADS) & (row < num_rows)
    column = tl.arange(0, BLOCK_H)
    inside = valid[:, None] & (column < H)[None, :]  # [8 * ROWS, BLOCK_H]
    gradient = _load_tile(dy, step, chunk, within, inside, HEADS, BLOCK_H).to(tl.float32)
    value = _load_tile(x, step, chunk, within, inside, HEADS, BLOCK_H).to(tl.float32)
    if dtotal[0] is not None:
        added = _load_tile(dtotal, step, chunk, within, inside, HEADS, BLOCK_H)
    rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
    normalized = value * rstd
    terms = gradient * normalized
    weighted = gradient * weight[None, :]
    mean = mean_of(row_tree(weighted * normalized, 8 * ROWS, BLOCK_H), 8 * ROWS, H)[:, None]
    dx = (rstd * (weighted - normalized * mean)).to(dx_ptr.dtype.element_ty)
    if dtotal[0] is not None:
        # Two gradients meet, both of the model's dtype.
        dx = (dx.to(tl.float32) + added.to(tl.float32)).to(dx.dtype)
    start = dx_ptr + step.to(tl.int64) * (16 * HEADS * H)
    tl.store(start + in_step[:, None] * H + column[None, :], dx, mask=inside)
    for level in tl.static_range(ROWS.bit_length() - 1):
        terms = tl.sum(tl.reshape(terms, (2, (ROWS >> (level + 1)) * 8 * BLOCK_H)), axis=0)
    return tl.reshape(terms, (8 * BLOCK_H,))


@triton.jit
def _parts(dy, x, dtotal, weight, rstd_ptr, dx_ptr, step, part, num_rows, H: tl.constexpr,
           HEADS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr,
           BLOCK_H: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """Parts part, part + STRIDE, ...: dx is stored, terms of dweight are added by the halving tree.

    The tree's last log2(LOOPS) levels are loops of two turns.
    """
    if STRIDE == SPLIT:
        return _part(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, step, part, num_rows, H, HEADS, ROWS, SPLIT,
            BLOCK_H,
        )  # fmt: skip
    elif STRIDE < LOOPS:
        # A zero in front of the sum changes a zero's sign only, which the step's sum drops.
        total = tl.zeros((8 * BLOCK_H,), tl.float32)
        for turn in tl.range(2, loop_unroll_factor=1):
            total += _parts(
                dy, x, dtotal, weight, rstd_ptr, dx_ptr, step, part + turn * STRIDE, num_rows, H,
                HEADS, ROWS, SPLIT, LOOPS, BLOCK_H, 2 * STRIDE,
            )  # fmt: skip
        return total
    else:
        low = _parts(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, step, part, num_rows, H, HEADS, ROWS, SPLIT,
            LOOPS, BLOCK_H, 2 * STRIDE,
        )  # fmt: skip
        high = _parts(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, step, part + STRIDE, num_rows, H, HEADS, ROWS,
            SPLIT, LOOPS, BLOCK_H, 2 * STRIDE,
        )  # fmt: skip
        return low + high


@triton.jit
def _chain(x, N: tl.constexpr):
    """[8 * N] -> [N]: zero plus eight rows one after another."""
    even, odd = tl.split(tl.permute(tl.reshape(x, (2, 2, 2, N)), (3, 0, 1, 2)))
    row0, row2 = tl.split(even)
    row1, row3 = tl.split(odd)
    row0, row4 = tl.split(row0)
    row1, row5 = tl.split(row1)
    row2, row6 = tl.split(row2)
    row3, row7 = tl.split(row3)
    return (((((((0.0 + row0) + row1) + row2) + row3) + row4) + row5) + row6) + row7


@triton.jit(do_not_specialize=["num_rows"])
def _narrow_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dtotal_ptr,
    dx_ptr,
    sums_ptr,
    num_rows,
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    dtotal_outer,
    dtotal_inner,
    H: tl.constexpr,
    DY_INNER: tl.constexpr,
    X_INNER: tl.constexpr,
    DTOTAL_INNER: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    LOOPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program, one step of the fold; dtotal and sums may be None."""
    step = tl.program_id(0)
    column = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    terms = _parts(
        (dy_ptr, dy_outer, dy_inner, DY_INNER), (x_ptr, x_outer, x_inner, X_INNER),
        (dtotal_ptr, dtotal_outer, dtotal_inner, DTOTAL_INNER), weight, rstd_ptr, dx_ptr, step, 0,
        num_rows, H, HEADS, ROWS, SPLIT, LOOPS, BLOCK_H, 1,
    )  # fmt: skip
    if sums_ptr is not None:
        total = _chain(terms, BLOCK_H)
        tl.store(sums_ptr + step.to(tl.int64) * H + column, total, mask=column < H)


def fits(rows: Rows, width: int, num_rows: int, rows_per_token: int) -> bool:
    """Whether the kernel can address a tensor: rows of one stride, or of one within a token and
    one between tokens, a step's offsets and the number of rows in 32 bits.
    """
    _, outer, inner, count = rows
    if count not in (1, rows_per_token):
        return False
    reach = STEP * rows_per_token // count * outer + count * inner + width
    return max(reach, num_rows + 2 * STEP * rows_per_token) < 2**31


def rms_norm_narrow_bwd(
    operands: Sequence[Rows],
    weight: Tensor,
    rstd: Tensor,
    dx: Tensor,
    sums: Tensor,
    rows_per_token: int,
    schedule: NarrowSchedule = NARROW,
) -> None:
    """Write dx and the step sums of `rms_norm_bwd`.

    Args:
        operands: dy, x and, where there is one, dtotal, each of a layout that `fits`.
        weight: [H].
        rstd: [rows] fp32.
        dx: contiguous, the shape of x.
        sums: [ceil(tokens / 16), H] fp32; without rows where they are not asked for.
        rows_per_token: rows of one token.
        schedule: any gives the same bytes.
    """
    width, num_rows = dx.shape[-1], rstd.shape[0]
    block, held = block_width(width), chunk_rows(rows_per_token)
    rows = min(schedule.rows, held)
    split = held // rows
    dy, x, dtotal = (*operands, (None, 0, 0, 1))[:3]
    _narrow_kernel[(-(-num_rows // (STEP * rows_per_token)),)](
        dy[0],
        x[0],
        weight.contiguous(),
        rstd,
        dtotal[0],
        dx,
        sums if sums.numel() else None,
        num_rows,
        dy[1],
        dy[2],
        x[1],
        x[2],
        dtotal[1],
        dtotal[2],
        H=width,
        DY_INNER=dy[3],
        X_INNER=x[3],
        DTOTAL_INNER=dtotal[3],
        HEADS=rows_per_token,
        ROWS=rows,
        SPLIT=split,
        # More than two parts unrolled do not fit the registers.
        LOOPS=max(schedule.loops, split // 2),
        BLOCK_H=block,
        num_warps=max(block // 32, 1),
        maxnreg=schedule.registers,
        enable_fp_fusion=False,
    )
