"""RMSNorm on CUDA: the norm of rows, optionally after adding a residual; dx, and the step sums of
dweight, by two kernels of the same bytes.

Shapes, dtypes, order, invariance: those of `rms_norm`.
Errors: ValueError on rows wider than one program holds (`block_width`).
Cost: memory-bound. Forward reads x (and the residual) and writes y (and the sum); backward reads
    dy, x (and the sum's gradient) and writes dx and one fp32 row per 16 tokens.

Every sum of a row is built from sums over an axis of two. Such a sum has only one order, so all
schedules give the same bytes.

One program of the backward pass computes one step of the fold, which is eight chunks of two tokens.
It takes the rows of a chunk, filled up to ROWS * SPLIT (a power of two), in SPLIT parts of ROWS.
`_wide_kernel` takes any rows, one chunk after another. `_narrow_kernel` takes tokens of several
short rows (q/k-norm) that `fits` admits, all eight chunks at once. Chunks lie over lanes and warps,
the rows of a chunk over registers. So a thread adds terms of dweight alone, and warps exchange sums
once per step. Row 8 * r + c of a part's tile [8 * ROWS, BLOCK_H] is row r * SPLIT + part of chunk
c.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.launch import cdiv, remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.rms_norm.schedules import (
    CHUNK_TOKENS,
    NARROW,
    NARROW_WIDTH,
    SCRATCH_BYTES,
    NarrowSchedule,
    NormSchedule,
    block_width,
    chunk_rows,
    pick_backward,
    pick_forward,
)

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
def load_rows(source, row, column, inside):
    """Rows of a source (pointer, outer stride, inner stride, INNER): [R, BLOCK_H]."""
    offsets = row_offsets(row, source[1], source[2], source[3])
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
    x = load_rows((x_ptr, x_outer, x_inner, X_INNER), row, column, inside)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    written = row[:, None] * H + column[None, :]
    if HAS_RESIDUAL:
        source = (residual_ptr, residual_outer, residual_inner, RESIDUAL_INNER)
        residual = load_rows(source, row, column, inside)
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
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    schedule: NormSchedule | None = None,
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


rms_norm_fwd_op = kernel_op(fake=_forward_fake, name="rms_norm_fwd_op")(rms_norm_fwd)


@triton.jit
def _dx_and_terms(gradient, normalized, added, weight, rstd, DTYPE: tl.constexpr, R: tl.constexpr,
                  H: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """dx of rows [R, BLOCK_H], in DTYPE, and their terms of dweight; weight [BLOCK_H], rstd [R, 1].
    `added` is the sum's gradient from another use, or None."""
    terms = gradient * normalized
    weighted = gradient * weight[None, :]
    mean = mean_of(row_tree(weighted * normalized, R, BLOCK_H), R, H)[:, None]
    dx = (rstd * (weighted - normalized * mean)).to(DTYPE)
    if added is not None:
        # Adds two gradients, each already rounded to the model's dtype.
        dx = (dx.to(tl.float32) + added.to(tl.float32)).to(DTYPE)
    return dx, terms


@triton.jit
def column_tree(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [N]: the halving tree over the rows, row i plus row i + R/2 first."""
    for level in tl.static_range(R.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (2, R >> (level + 1), N)), axis=0)
    return tl.reshape(x, (N,))


@triton.jit
def _wide_parts(
    sources, weight, rstd_ptr, dx_ptr, first, num_rows, H: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_H: tl.constexpr, PART: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Store dx of parts PART, PART + STRIDE, ... of the chunk from row `first`; return their terms
    of dweight [ROWS, BLOCK_H], added by the halving tree over parts. Sources: dy, x, dtotal."""
    if STRIDE == SPLIT:
        within = PART * ROWS + tl.arange(0, ROWS)
        row = first + within
        valid = (within < CHUNK_ROWS) & (row < num_rows)
        column = tl.arange(0, BLOCK_H)
        inside = valid[:, None] & (column < H)[None, :]
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
        gradient = load_rows(sources[0], row, column, inside).to(tl.float32)
        normalized = load_rows(sources[1], row, column, inside).to(tl.float32) * rstd
        added = None
        if sources[2][0] is not None:
            added = load_rows(sources[2], row, column, inside)
        dx, terms = _dx_and_terms(
            gradient, normalized, added, weight.to(tl.float32), rstd, dx_ptr.dtype.element_ty, ROWS,
            H, BLOCK_H,
        )  # fmt: skip
        tl.store(dx_ptr + row[:, None] * H + column[None, :], dx, mask=inside)
        return terms
    else:
        low = _wide_parts(
            sources, weight, rstd_ptr, dx_ptr, first, num_rows, H, CHUNK_ROWS, ROWS, SPLIT, BLOCK_H,
            PART, 2 * STRIDE,
        )  # fmt: skip
        high = _wide_parts(
            sources, weight, rstd_ptr, dx_ptr, first, num_rows, H, CHUNK_ROWS, ROWS, SPLIT, BLOCK_H,
            PART + STRIDE, 2 * STRIDE,
        )  # fmt: skip
        return low + high


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def _wide_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dtotal_ptr, dx_ptr, sums_ptr, num_rows,
    dy_outer, dy_inner, x_outer, x_inner, dtotal_outer, dtotal_inner,
    H: tl.constexpr, DY_INNER: tl.constexpr, X_INNER: tl.constexpr, DTOTAL_INNER: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK_ROWS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One step of the fold, chunk after chunk; dtotal and sums may be None."""
    step = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        first = (step * CHUNKS + chunk) * CHUNK_ROWS
        terms = _wide_parts(
            ((dy_ptr, dy_outer, dy_inner, DY_INNER), (x_ptr, x_outer, x_inner, X_INNER),
             (dtotal_ptr, dtotal_outer, dtotal_inner, DTOTAL_INNER)),
            weight, rstd_ptr, dx_ptr, first, num_rows, H, CHUNK_ROWS, ROWS, SPLIT, BLOCK_H, 0, 1,
        )  # fmt: skip
        total += column_tree(terms, ROWS, BLOCK_H)
    if sums_ptr is not None:
        tl.store(sums_ptr + step * H + column, total, mask=column < H)


@triton.jit
def _load_narrow(source, step, chunk, within, inside, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
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
def _narrow_parts(
    sources, weight, rstd_ptr, dx_ptr, step, part, num_rows, H: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr, BLOCK_H: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Store dx of parts part, part + STRIDE, ...; return their terms of dweight, chunk after chunk
    [8 * BLOCK_H], added by the halving tree over parts. Its last log2(LOOPS) levels are loops of
    two turns. Sources: dy, x, dtotal."""
    if STRIDE == SPLIT:
        index = tl.arange(0, 8 * ROWS)
        chunk, within = index % 8, index // 8 * SPLIT + part
        in_step = chunk * (2 * HEADS) + within
        row = step * (16 * HEADS) + in_step
        valid = (within < 2 * HEADS) & (row < num_rows)
        column = tl.arange(0, BLOCK_H)
        inside = valid[:, None] & (column < H)[None, :]  # [8 * ROWS, BLOCK_H]
        gradient = _load_narrow(sources[0], step, chunk, within, inside, HEADS, BLOCK_H).to(
            tl.float32
        )
        value = _load_narrow(sources[1], step, chunk, within, inside, HEADS, BLOCK_H).to(tl.float32)
        added = None
        if sources[2][0] is not None:
            added = _load_narrow(sources[2], step, chunk, within, inside, HEADS, BLOCK_H)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
        dx, terms = _dx_and_terms(
            gradient, value * rstd, added, weight, rstd, dx_ptr.dtype.element_ty, 8 * ROWS, H,
            BLOCK_H,
        )  # fmt: skip
        start = dx_ptr + step.to(tl.int64) * (16 * HEADS * H)
        tl.store(start + in_step[:, None] * H + column[None, :], dx, mask=inside)
        for level in tl.static_range(ROWS.bit_length() - 1):
            terms = tl.sum(tl.reshape(terms, (2, (ROWS >> (level + 1)) * 8 * BLOCK_H)), axis=0)
        return tl.reshape(terms, (8 * BLOCK_H,))
    elif STRIDE < LOOPS:
        # Starting from 0 changes only the sign of a zero, and `_chain` starts from 0 too.
        total = tl.zeros((8 * BLOCK_H,), tl.float32)
        for turn in tl.range(2, loop_unroll_factor=1):
            total += _narrow_parts(
                sources, weight, rstd_ptr, dx_ptr, step, part + turn * STRIDE, num_rows, H, HEADS,
                ROWS, SPLIT, LOOPS, BLOCK_H, 2 * STRIDE,
            )  # fmt: skip
        return total
    else:
        low = _narrow_parts(
            sources, weight, rstd_ptr, dx_ptr, step, part, num_rows, H, HEADS, ROWS, SPLIT, LOOPS,
            BLOCK_H, 2 * STRIDE,
        )  # fmt: skip
        high = _narrow_parts(
            sources, weight, rstd_ptr, dx_ptr, step, part + STRIDE, num_rows, H, HEADS, ROWS, SPLIT,
            LOOPS, BLOCK_H, 2 * STRIDE,
        )  # fmt: skip
        return low + high


@triton.jit
def _chain(x, N: tl.constexpr):
    """[8 * N] -> [N]: 0 plus eight rows, one after another."""
    even, odd = tl.split(tl.permute(tl.reshape(x, (2, 2, 2, N)), (3, 0, 1, 2)))
    row0, row2 = tl.split(even)
    row1, row3 = tl.split(odd)
    row0, row4 = tl.split(row0)
    row1, row5 = tl.split(row1)
    row2, row6 = tl.split(row2)
    row3, row7 = tl.split(row3)
    return (((((((0.0 + row0) + row1) + row2) + row3) + row4) + row5) + row6) + row7


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def _narrow_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dtotal_ptr, dx_ptr, sums_ptr, num_rows,
    dy_outer, dy_inner, x_outer, x_inner, dtotal_outer, dtotal_inner,
    H: tl.constexpr, DY_INNER: tl.constexpr, X_INNER: tl.constexpr, DTOTAL_INNER: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, LOOPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One step of the fold; dtotal and sums may be None."""
    step = tl.program_id(0)
    column = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    terms = _narrow_parts(
        ((dy_ptr, dy_outer, dy_inner, DY_INNER), (x_ptr, x_outer, x_inner, X_INNER),
         (dtotal_ptr, dtotal_outer, dtotal_inner, DTOTAL_INNER)),
        weight, rstd_ptr, dx_ptr, step, 0, num_rows, H, HEADS, ROWS, SPLIT, LOOPS, BLOCK_H, 1,
    )  # fmt: skip
    if sums_ptr is not None:
        total = _chain(terms, BLOCK_H)
        tl.store(sums_ptr + step.to(tl.int64) * H + column, total, mask=column < H)


def rms_norm_bwd(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    rows_per_token: int,
    with_sums: bool,
    schedule: NormSchedule | NarrowSchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """dx, and the step sums of dweight: [ceil(tokens / 16), H] fp32, no rows unless `with_sums`.

    x [..., H] is what was normalised. dtotal, its gradient from another use, is added after dx is
    rounded. rstd [rows] fp32 comes from the forward pass. The schedule's class says which kernel
    runs; a `NarrowSchedule` is for operands that `fits` admits.
    """
    width, num_rows = x.shape[-1], rstd.shape[0]
    adds = dtotal is not None
    chosen = schedule or pick_backward(width, rows_per_token, num_rows, x.dtype, adds, x.device)
    dx, sums = _gradients(x, rstd, rows_per_token, with_sums)
    if dx.numel() == 0:
        return dx, sums
    operands = [rows_of(t) for t in (dy, x, dtotal) if t is not None]
    short = schedule is None and rows_per_token > 1 and block_width(width) <= NARROW_WIDTH
    if short and all(fits(rows, width, num_rows, rows_per_token) for rows in operands):
        chosen = NARROW
    if isinstance(chosen, NarrowSchedule):
        kernel, options = _narrow_kernel, _narrow_options(chosen, width, rows_per_token)
    else:
        held = chunk_rows(rows_per_token)
        chunk_bytes = len(operands) * held * block_width(width) * x.element_size()
        # As many chunks ahead as fit shared memory.
        ahead = ((200 if has_tma(x.device) else 96) * 1024 - SCRATCH_BYTES) // chunk_bytes
        kernel, options = (
            _wide_kernel,
            {
                "CHUNKS": STEP // CHUNK_TOKENS,
                "CHUNK_ROWS": CHUNK_TOKENS * rows_per_token,
                "ROWS": held // chosen.split,
                "SPLIT": chosen.split,
                "STAGES": max(min(chosen.stages, 1 + ahead), 1),
                "num_warps": chosen.warps,
            },
        )
    of_dy, of_x, of_dtotal = (*operands, Rows(None, 0, 0, 1))[:3]
    kernel[(cdiv(num_rows, STEP * rows_per_token),)](
        of_dy.tensor, of_x.tensor, weight.contiguous(), rstd, of_dtotal.tensor, dx,
        sums if with_sums else None, num_rows, of_dy.outer, of_dy.inner, of_x.outer, of_x.inner,
        of_dtotal.outer, of_dtotal.inner, H=width, DY_INNER=of_dy.count, X_INNER=of_x.count,
        DTOTAL_INNER=of_dtotal.count, BLOCK_H=block_width(width), enable_fp_fusion=False, **options,
    )  # fmt: skip
    return dx, sums


def _narrow_options(schedule: NarrowSchedule, width: int, rows_per_token: int) -> dict[str, Any]:
    held = chunk_rows(rows_per_token)
    rows = min(schedule.rows, held)
    return {
        "HEADS": rows_per_token,
        "ROWS": rows,
        "SPLIT": held // rows,
        # Registers hold at most two unrolled parts.
        "LOOPS": max(schedule.loops, held // rows // 2),
        "num_warps": max(block_width(width) // 32, 1),
        "maxnreg": schedule.registers,
    }


def fits(rows: Rows, width: int, num_rows: int, rows_per_token: int) -> bool:
    """Whether the narrow kernel can address a tensor: its rows have one stride, or one within a
    token and one between tokens; a step's offsets and the number of rows fit 32 bits."""
    _, outer, inner, count = rows
    if count not in (1, rows_per_token):
        return False
    reach = STEP * rows_per_token // count * outer + count * inner + width
    return max(reach, num_rows + 2 * STEP * rows_per_token) < 2**31


def _gradients(
    x: Tensor, rstd: Tensor, rows_per_token: int, with_sums: bool
) -> tuple[Tensor, Tensor]:
    steps = cdiv(rstd.shape[0], STEP * rows_per_token) if with_sums else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, rstd.new_empty((steps, x.shape[-1]))


rms_norm_bwd_op = kernel_op(
    fake=lambda dy, dtotal, x, weight, *rest: _gradients(x, *rest), name="rms_norm_bwd_op"
)(rms_norm_bwd)
