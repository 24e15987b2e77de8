"""The gradient fold of columns in Triton: the halving tree of each step, then the steps upward.

Shapes, dtypes, order, invariance: those of `gradient_fold`. Errors: none.
Cost: memory-bound.

One program adds all steps of a column, and no other program reads what it writes.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.device import dense_rows
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.reduction.tree_fold_triton import halve

STEP = 16
"""Tokens in one step of the fold."""

BATCH = 64
"""Step sums that a program of `fold_step_sums` loads at once."""


@triton.jit
def _pair(rows_ptr, row, columns, inside, last, stride, FIRST: tl.constexpr, P: tl.constexpr):
    """Group FIRST plus group FIRST + 8 of a step's sixteen groups of P rows."""
    low, high = row + FIRST * P, row + (FIRST + 8) * P
    a = tl.load(
        rows_ptr + low.to(tl.int64) * stride + columns, mask=inside & (low < last), other=0.0
    )
    b = tl.load(
        rows_ptr + high.to(tl.int64) * stride + columns, mask=inside & (high < last), other=0.0
    )
    return a.to(tl.float32) + b.to(tl.float32)


@remembered
@triton.jit
def _step_sums_kernel(
    rows_ptr, sums_ptr, R, C, stride,
    STEP_ROWS: tl.constexpr, P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The halving tree over one step's rows, filled up with zeros to 16 * P rows."""
    step = tl.program_id(0)
    within = tl.arange(0, P * BLOCK_C)
    columns = tl.program_id(1) * BLOCK_C + within % BLOCK_C
    inside = columns < C
    first = step * STEP_ROWS
    row = first + within // BLOCK_C
    last = tl.minimum(first + STEP_ROWS, R)
    # The first four levels of the tree add registers of one thread; the others add the last P rows.
    even = _pair(rows_ptr, row, columns, inside, last, stride, 0, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 4, P
    )
    even += _pair(rows_ptr, row, columns, inside, last, stride, 2, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 6, P
    )
    odd = _pair(rows_ptr, row, columns, inside, last, stride, 1, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 5, P
    )
    odd += _pair(rows_ptr, row, columns, inside, last, stride, 3, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 7, P
    )
    total = tl.reshape(even + odd, (1, P * BLOCK_C))
    for level in tl.static_range(P.bit_length() - 1):
        total = halve(total, 1, P * BLOCK_C >> level)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(
        sums_ptr + step.to(tl.int64) * C + columns, tl.reshape(total, (BLOCK_C,)), mask=columns < C
    )


@triton.jit
def _load_steps(row, inside, count, C: tl.constexpr, BATCH: tl.constexpr):
    """The next BATCH step sums of a program's columns; zeros after the first `count`."""
    steps = ()
    for i in tl.static_range(BATCH):
        steps = steps + (tl.load(row + i * C, mask=inside & (i < count), other=0.0),)
    return steps


@remembered
@triton.jit
def _fold_steps_kernel(
    sums_ptr, buffer_ptr, S, stride,
    FRESH: tl.constexpr, C: tl.constexpr, BATCH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Continue the buffer; FRESH starts from zero in fp64 and rounds to a narrower buffer."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    pointers = buffer_ptr + columns.to(tl.int64) * stride
    row = sums_ptr + columns
    # Each turn loads the next turn's batch. Within one turn the compiler would spread the loads
    # between the additions.
    ahead = _load_steps(row, inside, S, C, BATCH)
    if FRESH:
        acc = tl.zeros((BLOCK_C,), tl.float64)
    else:
        acc = tl.load(pointers, mask=inside, other=0.0)
    for start in range(0, S, BATCH):
        steps = ahead
        row += BATCH * C
        ahead = _load_steps(row, inside, S - start - BATCH, C, BATCH)
        for i in tl.static_range(BATCH):
            acc += steps[i].to(acc.dtype)
    if acc.dtype != buffer_ptr.dtype.element_ty:
        acc = acc.to(tl.float32).to(buffer_ptr.dtype.element_ty)
    tl.store(pointers, acc, mask=inside)


def step_sums(rows: Tensor, rows_per_token: int) -> Tensor:
    """The halving tree of each step: [T * rows_per_token, C] -> [ceil(T / 16), C] fp32."""
    rows = dense_rows(rows)
    num_rows, columns = rows.shape
    step = STEP * rows_per_token
    sums = rows.new_empty((cdiv(num_rows, step), columns), dtype=torch.float32)
    padded = next_power_of_2(rows_per_token)
    block = min(next_power_of_2(columns), max(1024 // padded, 16))
    _step_sums_kernel[(sums.shape[0], cdiv(columns, block))](
        rows, sums, num_rows, columns, rows.stride(0), STEP_ROWS=step, P=padded, BLOCK_C=block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return sums


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def fold_step_sums(buffer: Tensor, sums: Tensor, fresh: bool = False) -> None:
    """Continue `buffer` [C] (fp64 or fp32) over step sums [S, C] (fp32, contiguous), S upward.

    A `fresh` fp64 buffer counts as all zero.
    """
    launch_steps(buffer, sums, fresh=fresh)


@kernel_op(fake=lambda sums, dtype: sums.new_empty((sums.shape[1],), dtype=dtype))
def folded_step_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Fold step sums [S, C] (fp32, contiguous) from zero in fp64 -> [C], rounded to fp32 and then
    to `dtype`."""
    folded = sums.new_empty((sums.shape[1],), dtype=dtype)
    launch_steps(folded, sums, fresh=True)
    return folded


def launch_steps(buffer: Tensor, sums: Tensor, *, fresh: bool, batch: int = BATCH) -> None:
    """`fold_step_sums`, loading `batch` of them at once."""
    if sums.numel():
        steps, columns = sums.shape
        block = 32
        _fold_steps_kernel[(cdiv(columns, block),)](
            sums, buffer, steps, buffer.stride(0), FRESH=fresh, C=columns, BATCH=batch,
            BLOCK_C=block, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    elif fresh:
        buffer.zero_()


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def gradient_fold_columns(
    buffer: Tensor, rows: Tensor, rows_per_token: int, fresh: bool = False
) -> None:
    """Continue `buffer` [C] (fp64 or fp32) over rows [T * rows_per_token, C].

    A `fresh` fp64 buffer counts as all zero.
    """
    if min(rows.shape) > 0:
        launch_steps(buffer, step_sums(rows, rows_per_token), fresh=fresh)
    elif fresh:
        buffer.zero_()
