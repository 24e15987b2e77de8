"""Triton schedules of the RMSNorm order, with and without a residual addition in front.

Shapes, dtypes, order, invariance: those of `rms_norm`; its bytes are the CPU schedule's too.
Errors: `block_width` refuses rows wider than a program holds (ValueError).
Cost: memory-bound. Forward reads x (and the residual) and writes y (and the sum); backward reads
    dy, x (and the sum's gradient) and writes dx, and 1/16 of an fp32 row per token for dweight.

All sums here are trees made of sums over an axis of two, which have one order whatever registers
their operands lie in. So every schedule gives the same bytes.
"""

# Pyright does not know what a kernel's constexpr arguments and loops are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.rms_norm.narrow_triton import Rows, fits, rms_norm_narrow_bwd
from rl_consistency.kernels.rms_norm.row_tree_triton import mean_of, row_tree
from rl_consistency.kernels.rms_norm.schedules import (
    CHUNK_TOKENS,
    Schedule,
    block_width,
    chunk_rows,
    is_narrow,
    pick_backward,
    pick_forward,
    within_shared,
)

MAX_INNER = 256
"""Rows of one token that a kernel is compiled for; a view with more is copied."""


@triton.jit
def column_tree(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [N]: the halving tree over the rows, row i plus row i + R/2 first."""
    for level in tl.static_range(R.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (2, R >> (level + 1), N)), axis=0)
    return tl.reshape(x, (N,))


@triton.jit
def row_offsets(row, stride_outer, stride_inner, INNER: tl.constexpr):
    """Where rows begin in a tensor [outer, INNER, H] of any strides."""
    if INNER == 1:
        return row.to(tl.int64) * stride_outer
    return (row // INNER).to(tl.int64) * stride_outer + (row % INNER) * stride_inner


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    num_rows,
    eps,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    H: tl.constexpr,
    X_INNER: tl.constexpr,
    RESIDUAL_INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_H)
    inside = (row < num_rows)[:, None] & (column < H)[None, :]  # [ROWS, BLOCK_H]
    x = tl.load(
        x_ptr + row_offsets(row, x_outer, x_inner, X_INNER)[:, None] + column[None, :],
        mask=inside,
        other=0.0,
    )
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    written = row[:, None] * H + column[None, :]
    if HAS_RESIDUAL:
        offsets = row_offsets(row, residual_outer, residual_inner, RESIDUAL_INNER)
        residual = tl.load(
            residual_ptr + offsets[:, None] + column[None, :], mask=inside, other=0.0
        )
        # The sum has the model's dtype before it is normalised, as without the fusion.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + written, x, mask=inside)
    x = x.to(tl.float32)
    mean_square = mean_of(row_tree(x * x, ROWS, BLOCK_H), ROWS, H)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    y = (x * rstd[:, None]) * weight[None, :]
    tl.store(y_ptr + written, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_rows(source, row, column, inside, INNER: tl.constexpr):
    """Rows of a source (pointer, outer stride, inner stride): [R, BLOCK_H]."""
    offsets = row_offsets(row, source[1], source[2], INNER)
    return tl.load(source[0] + offsets[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _part(dy, x, dtotal, weight, rstd_ptr, dx_ptr, row, valid, H: tl.constexpr,
          DY_INNER: tl.constexpr, X_INNER: tl.constexpr, DTOTAL_INNER: tl.constexpr,
          HAS_DTOTAL: tl.constexpr, R: tl.constexpr,
          BLOCK_H: tl.constexpr):  # fmt: skip
    """Store dx of rows [R]; their terms of dweight, [R, BLOCK_H]."""
    column = tl.arange(0, BLOCK_H)
    inside = valid[:, None] & (column < H)[None, :]
    rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
    gradient = _load_rows(dy, row, column, inside, DY_INNER).to(tl.float32)
    normalized = _load_rows(x, row, column, inside, X_INNER).to(tl.float32) * rstd
    if HAS_DTOTAL:
        added = _load_rows(dtotal, row, column, inside, DTOTAL_INNER)
    terms = gradient * normalized
    weighted = gradient * weight.to(tl.float32)[None, :]
    mean = mean_of(row_tree(weighted * normalized, R, BLOCK_H), R, H)[:, None]
    dx = (rstd * (weighted - normalized * mean)).to(dx_ptr.dtype.element_ty)
    if HAS_DTOTAL:
        # Two gradients meet, both of the model's dtype.
        dx = (dx.to(tl.float32) + added.to(tl.float32)).to(dx.dtype)
    tl.store(dx_ptr + row[:, None] * H + column[None, :], dx, mask=inside)
    return terms


@triton.jit
def _parts(dy, x, dtotal, weight, rstd_ptr, dx_ptr, first, num_rows, H: tl.constexpr,
           DY_INNER: tl.constexpr, X_INNER: tl.constexpr, DTOTAL_INNER: tl.constexpr,
           HAS_DTOTAL: tl.constexpr, CHUNK_ROWS: tl.constexpr, ROWS: tl.constexpr,
           SPLIT: tl.constexpr, BLOCK_H: tl.constexpr, PART: tl.constexpr,
           STRIDE: tl.constexpr):  # fmt: skip
    """Parts PART, PART + STRIDE, ... of the chunk from row `first`: dx is stored, the terms of
    dweight [ROWS, BLOCK_H] are added by the halving tree over parts.
    """
    if STRIDE == SPLIT:
        within = PART * ROWS + tl.arange(0, ROWS)
        row = first + within
        valid = (within < CHUNK_ROWS) & (row < num_rows)
        return _part(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, row, valid, H, DY_INNER, X_INNER,
            DTOTAL_INNER, HAS_DTOTAL, ROWS, BLOCK_H,
        )  # fmt: skip
    else:
        low = _parts(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, first, num_rows, H, DY_INNER, X_INNER,
            DTOTAL_INNER, HAS_DTOTAL, CHUNK_ROWS, ROWS, SPLIT, BLOCK_H, PART, 2 * STRIDE,
        )  # fmt: skip
        high = _parts(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, first, num_rows, H, DY_INNER, X_INNER,
            DTOTAL_INNER, HAS_DTOTAL, CHUNK_ROWS, ROWS, SPLIT, BLOCK_H, PART + STRIDE, 2 * STRIDE,
        )  # fmt: skip
        return low + high


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
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
    HAS_DTOTAL: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program, one step of the fold: chunk after chunk, each in SPLIT parts of ROWS rows."""
    step = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0)
    dy = (dy_ptr, dy_outer, dy_inner)
    x = (x_ptr, x_outer, x_inner)
    dtotal = (dtotal_ptr, dtotal_outer, dtotal_inner)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        first = (step * CHUNKS + chunk) * CHUNK_ROWS
        terms = _parts(
            dy, x, dtotal, weight, rstd_ptr, dx_ptr, first, num_rows, H, DY_INNER, X_INNER,
            DTOTAL_INNER, HAS_DTOTAL, CHUNK_ROWS, ROWS, SPLIT, BLOCK_H, 0, 1,
        )  # fmt: skip
        total += column_tree(terms, ROWS, BLOCK_H)
    if HAS_SUMS:
        tl.store(sums_ptr + step * H + column, total, mask=column < H)


def _rows(x: Tensor) -> Rows:
    """x, or a copy, with rows addressable as [outer, INNER, H]."""
    if x.is_contiguous():
        return x, x.shape[-1], 0, 1
    stride, count = 0, 1
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if count == 1:
            stride = step
        elif step != stride * count:
            break
        count *= size
    else:
        if x.stride(-1) == 1:
            return x, stride, 0, 1
    if x.dim() == 3 and x.stride(-1) == 1 and x.shape[1] <= MAX_INNER:
        return x, x.stride(0), x.stride(1), x.shape[1]
    x = x.contiguous()
    return x, x.shape[-1], 0, 1


def rms_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x [..., H], or of x + residual rounded to the dtype.

    Returns:
        (y, x + residual, 1/sqrt(mean square + eps)): shapes of x, of x (empty without a residual),
        and [rows] fp32.
    """
    width = x.shape[-1]
    schedule = schedule or pick_forward(width)
    y, total, rstd = _forward_fake(x, residual, weight, eps)
    num_rows = rstd.shape[0]
    if y.numel() == 0:
        return y, total, rstd
    x, x_outer, x_inner, x_heads = _rows(x)
    added, a_outer, a_inner, a_heads = (x, 0, 0, 1) if residual is None else _rows(residual)
    _forward_kernel[(-(-num_rows // schedule.rows),)](
        x,
        added,
        weight.contiguous(),
        y,
        total,
        rstd,
        num_rows,
        eps,
        x_outer,
        x_inner,
        a_outer,
        a_inner,
        H=width,
        X_INNER=x_heads,
        RESIDUAL_INNER=a_heads,
        HAS_RESIDUAL=residual is not None,
        ROWS=schedule.rows,
        BLOCK_H=block_width(width),
        num_warps=schedule.warps,
        enable_fp_fusion=False,
    )
    return y, total, rstd


def rms_norm_bwd(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    rows_per_token: int,
    with_sums: bool,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """dx, and what dweight folds.

    Args:
        dy: gradient of y, [..., H].
        dtotal: gradient of x itself from elsewhere, added to dx after rounding; or None.
        x: what was normalised, [..., H].
        weight: [H].
        rstd: [rows] fp32, of the forward pass.
        rows_per_token: rows of one token.
        with_sums: whether dweight is asked for.
        schedule: of `_backward_kernel`; without one, narrow rows take the kernel made for them.

    Returns:
        (dx, step sums [ceil(tokens / 16), H] fp32, without rows unless asked for).
    """
    width, num_rows = x.shape[-1], rstd.shape[0]
    narrow = schedule is None and is_narrow(width, rows_per_token)
    schedule = schedule or pick_backward(width, rows_per_token)
    dx, sums = _backward_fake(dy, dtotal, x, weight, rstd, rows_per_token, with_sums)
    if dx.numel() == 0:
        return dx, sums
    operands = [_rows(t) for t in (dy, x, dtotal) if t is not None]
    if narrow and all(fits(rows, width, num_rows, rows_per_token) for rows in operands):
        rms_norm_narrow_bwd(operands, weight, rstd, dx, sums, rows_per_token)
        return dx, sums
    held = chunk_rows(rows_per_token) * block_width(width)
    limit = (200 if has_tma(x.device) else 96) * 1024
    schedule = within_shared(schedule, len(operands) * held * x.element_size(), limit)
    dy, dy_outer, dy_inner, dy_heads = operands[0]
    x, x_outer, x_inner, x_heads = operands[1]
    added, a_outer, a_inner, a_heads = (x, 0, 0, 1) if dtotal is None else operands[2]
    _backward_kernel[(-(-num_rows // (STEP * rows_per_token)),)](
        dy,
        x,
        weight.contiguous(),
        rstd,
        added,
        dx,
        sums,
        num_rows,
        dy_outer,
        dy_inner,
        x_outer,
        x_inner,
        a_outer,
        a_inner,
        H=width,
        DY_INNER=dy_heads,
        X_INNER=x_heads,
        DTOTAL_INNER=a_heads,
        HAS_DTOTAL=dtotal is not None,
        HAS_SUMS=with_sums,
        CHUNKS=STEP // CHUNK_TOKENS,
        CHUNK_ROWS=CHUNK_TOKENS * rows_per_token,
        ROWS=chunk_rows(rows_per_token) // schedule.split,
        SPLIT=schedule.split,
        BLOCK_H=block_width(width),
        STAGES=schedule.stages,
        num_warps=schedule.warps,
        maxnreg=schedule.registers,
        enable_fp_fusion=False,
    )
    return dx, sums


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x.new_empty((0,)) if residual is None else torch.empty_like(y)
    return y, total, x.new_empty((x.shape[:-1].numel(),), dtype=torch.float32)


def _backward_fake(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    rows_per_token: int,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    steps = -(-rstd.shape[0] // (STEP * rows_per_token)) if with_sums else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, rstd.new_empty((steps, x.shape[-1]))


@kernel_op(fake=_forward_fake)
def rms_norm_fwd_op(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_fwd` as a compiler sees it: one opaque call."""
    return rms_norm_fwd(x, residual, weight, eps)


@kernel_op(fake=_backward_fake)
def rms_norm_bwd_op(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    rows_per_token: int,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """`rms_norm_bwd` as a compiler sees it: one opaque call."""
    return rms_norm_bwd(dy, dtotal, x, weight, rstd, rows_per_token, with_sums)
