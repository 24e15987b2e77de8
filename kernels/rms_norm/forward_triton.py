"""RMSNorm forward on CUDA: the norm of rows, optionally after adding a residual.

Shapes, dtypes, order, invariance: those of `rms_norm`.
Errors: ValueError on rows wider than one program holds (`block_width`).
Cost: memory-bound; reads x (and the residual), writes y (and the sum).

Every sum is built from sums over an axis of two. Such a sum has only one order, so all schedules
give the same bytes.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.rms_norm.schedules import Schedule, block_width, pick_forward

MAX_INNER = 256
"""Most rows of one token that a kernel is compiled for; a view with more is copied."""


@triton.jit
def row_tree(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [R], N a power of two >= 8: a halving tree in every eight neighbours, then one over
    the N / 8 groups."""
    x = tl.reshape(x, (R, N // 8, 8))
    for level in tl.static_range(3):
        x = tl.sum(tl.reshape(x, (R, N // 8, 2, 4 >> level)), axis=2)
    for level in tl.static_range(N.bit_length() - 4):
        x = tl.sum(tl.reshape(x, (R, 2, N >> (level + 4))), axis=1)
    return tl.reshape(x, (R,))


@triton.jit
def mean_of(total, R: tl.constexpr, H: tl.constexpr):
    """total [R] / H; for a power of two, total * (1 / H) has the same bits."""
    if H & (H - 1) == 0:
        return total * (1.0 / H)
    return tl.div_rn(total, tl.full((R,), H, tl.float32))


@triton.jit
def row_offsets(row, stride_outer, stride_inner, INNER: tl.constexpr):
    """Offsets of rows in a tensor [outer, INNER, H] of any strides."""
    if INNER == 1:
        return row.to(tl.int64) * stride_outer
    return (row // INNER).to(tl.int64) * stride_outer + (row % INNER) * stride_inner


@triton.jit
def load_rows(source, row, column, inside, INNER: tl.constexpr):
    """Rows of a source (pointer, outer stride, inner stride): [R, BLOCK_H]."""
    offsets = row_offsets(row, source[1], source[2], INNER)
    return tl.load(source[0] + offsets[:, None] + column[None, :], mask=inside, other=0.0)


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, num_rows, eps, x_outer, x_inner,
    residual_outer, residual_inner,
    H: tl.constexpr, X_INNER: tl.constexpr, RESIDUAL_INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_H)
    inside = (row < num_rows)[:, None] & (column < H)[None, :]  # [ROWS, BLOCK_H]
    x = load_rows((x_ptr, x_outer, x_inner), row, column, inside, X_INNER)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    written = row[:, None] * H + column[None, :]
    if HAS_RESIDUAL:
        source = (residual_ptr, residual_outer, residual_inner)
        residual = load_rows(source, row, column, inside, RESIDUAL_INNER)
        # The separate addition also rounds the sum to the model's dtype.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + written, x, mask=inside)
    x = x.to(tl.float32)
    mean_square = mean_of(row_tree(x * x, ROWS, BLOCK_H), ROWS, H)
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    y = (x * rstd[:, None]) * weight[None, :]
    tl.store(y_ptr + written, y.to(y_ptr.dtype.element_ty), mask=inside)


class Rows(NamedTuple):
    """A tensor whose rows a kernel addresses as [outer, count, H]."""

    tensor: Tensor | None
    outer: int
    """Elements from one group of rows to the next."""
    inner: int
    """Elements from one row of a group to the next."""
    count: int
    """Rows of a group; 1 if all rows have one stride."""


def rows_of(x: Tensor) -> Rows:
    """The rows of x [..., H], copied if a kernel cannot address them."""
    if x.is_contiguous():
        return Rows(x, x.shape[-1], 0, 1)
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
            return Rows(x, stride, 0, 1)
    if x.dim() == 3 and x.stride(-1) == 1 and x.shape[1] <= MAX_INNER:
        return Rows(x, x.stride(0), x.stride(1), x.shape[1])
    return Rows(x.contiguous(), x.shape[-1], 0, 1)


def rms_norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, schedule: Schedule | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, total = x + residual (empty without a residual) and rstd = 1/sqrt(mean square + eps).

    x, y and total are [..., H]; rstd is [rows] fp32.
    """
    width, adds = x.shape[-1], residual is not None
    y, total, rstd = _forward_fake(x, residual, weight, eps)
    num_rows = rstd.shape[0]
    if schedule is None:
        schedule = pick_forward(width, num_rows, x.dtype, adds, x.device)
    if y.numel() == 0:
        return y, total, rstd
    rows = rows_of(x)
    overlap = has_tma(x.device)
    added = Rows(rows.tensor, 0, 0, 1) if residual is None else rows_of(residual)
    _forward_kernel[(cdiv(num_rows, schedule.rows),)](
        rows.tensor, added.tensor, weight.contiguous(), y, total, rstd, num_rows, eps,
        rows.outer, rows.inner, added.outer, added.inner,
        H=width, X_INNER=rows.count, RESIDUAL_INNER=added.count, HAS_RESIDUAL=adds,
        ROWS=schedule.rows, BLOCK_H=block_width(width), OVERLAP=overlap, launch_pdl=overlap,
        num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return y, total, rstd


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x.new_empty((0,)) if residual is None else torch.empty_like(y)
    return y, total, x.new_empty((x.shape[:-1].numel(),), dtype=torch.float32)


@kernel_op(fake=_forward_fake)
def rms_norm_fwd_op(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_fwd` as a compiler sees it: one opaque call."""
    return rms_norm_fwd(x, residual, weight, eps)
