"""g <- g + sum_t outer(dy_t, x_t): parameter gradients as a left fold over tokens.

Shapes: `fold_outer`: g [N, K], dy [T, N], x [T, K]. `fold_columns`: g [C], rows [R, C].
    `fold_rows`: g [V, C], index [T], rows [T, C].
Dtypes and rounding points: operands fp32, bf16 or fp16; exact products; g is fp32, or fp64 where
    `accumulator_dtype` says so.
Order: ORDER below, `gradient_fold`.
Invariant to: where the tokens are cut into calls, if every cut falls on a multiple of 16.
Varies with: the order of the tokens.
Backward: none.
Errors: on CUDA TypeError on operands of two dtypes.
Cost: one rank-16 update of g per 16 tokens; on a GPU g is read and written once per call.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.core.operand import aligned, require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold import columns_triton, outer_triton
from rl_consistency.kernels.gradient_fold.rows_triton import gradient_fold_rows
from rl_consistency.kernels.matmul.cublaslt import outer_from_zero
from rl_consistency.kernels.reduction.sums import tree_sum

STEP = 16
"""Tokens in one step of the fold. In the packed layout sequences start on a multiple of it."""

ORDER = ReductionOrder(
    id="gradient_fold",
    version=3,
    cpu="""\
for each 16 tokens, upward, with zeros after a short last step:
    matrix (fp32): g = addmm(g, dy_step^T, x_step), one call of the matrix library
    vector (fp64): g += halving tree over the step's rows, in fp32
for each token t, upward:
    embedding (fp32): g[index[t]] += rows[t]
at the end of a call on a matrix: g += 0, which turns -0 into +0
parameter.grad = fp32(the buffers of all places of the parameter, added in the order of the places)
""",
    cuda="""\
for each 16 tokens, upward, with zeros after a short last step:
    matrix of bf16 or fp16 operands (fp32): g = one step of the matrix unit on g
        (m16n8k16, or wgmma with k16), g being the accumulator
    matrix of fp32 operands (fp64): g += fp32 sum of the 16 products, from zero, by fused
        multiply-adds
    vector (fp64): g += halving tree over the step's rows, in fp32
for each token t, upward:
    embedding (fp32; fp64 for an fp32 parameter): g[index[t]] += rows[t]
at the end of a call on a matrix: g += 0, which turns -0 into +0
parameter.grad = fp32(the buffers of all places of the parameter, added in the order of the places)
""",
)


def fold_outer(buffer: Tensor, dy: Tensor, x: Tensor, *, fresh: bool = False) -> None:
    """Continue `buffer` [N, K] (fp32, in place) over the tokens of dy [T, N] and x [T, K].

    A `fresh` buffer counts as all zero. On CUDA fp32 operands take an fp64 buffer; an fp32 one
    would be rounded at the end of every call.
    """
    if not buffer.is_contiguous():
        # A library takes another way through a buffer that lies otherwise, with other bits.
        whole = buffer.contiguous()
        fold_outer(whole, dy, x, fresh=fresh)
        buffer.copy_(whole)
        return
    if buffer.is_cuda:
        if (dy.dtype, dy.device) != (x.dtype, x.device):
            require_operands("gradient_fold", dy=dy, x=x)
        if not (fresh and outer_from_zero(dy, x, buffer)):
            outer_triton.gradient_fold_outer(buffer, dy, x, fresh)
        return
    if fresh:
        buffer.zero_()
    dy, x = _whole_steps(dy), _whole_steps(x)
    for dy_step, x_step in zip(dy.split(STEP), x.split(STEP), strict=True):
        buffer.addmm_(dy_step.t(), x_step)
    # A step of padding turns -0 (an underflowed product) into +0. Adding 0 gives the same bits
    # without padding.
    buffer.add_(0.0)


def fold_columns(
    buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1, fresh: bool = False
) -> None:
    """Continue `buffer` [C] (fp64 or fp32, in place) over rows [T * rows_per_token, C].

    A `fresh` fp64 buffer counts as all zero.
    """
    if buffer.is_cuda:
        columns_triton.gradient_fold_columns(buffer, rows, rows_per_token, fresh)
        return
    fold_step_sums(buffer, step_sums(rows, rows_per_token), fresh=fresh)


def step_sums(rows: Tensor, rows_per_token: int) -> Tensor:
    """The halving tree of each step on a CPU: [T * rows_per_token, C] -> [ceil(T / 16), C] fp32."""
    step = STEP * rows_per_token
    return tree_sum(_whole_steps(rows, step).view(-1, step, rows.shape[1]), dim=1)


def fold_step_sums(buffer: Tensor, sums: Tensor, *, fresh: bool = False) -> None:
    """Continue `buffer` [C] (fp64 or fp32, in place) over its steps' fp32 sums [S, C].

    The caller has added the rows of each step by the halving tree. A `fresh` fp64 buffer counts as
    all zero.
    """
    if buffer.is_cuda:
        columns_triton.fold_step_sums(buffer, sums, fresh)
        return
    if fresh:
        buffer.zero_()
    for step in sums.unbind(0):
        buffer.add_(step)


def fold_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """Continue `buffer` [V, C] (fp32 or fp64, in place): row index[t] += rows[t], t upward; an
    index of -1 skips a row."""
    if buffer.is_cuda:
        gradient_fold_rows(buffer, index, rows)
        return
    kept = index >= 0
    buffer.index_add_(0, index[kept], rows[kept].float())


def _whole_steps(rows: Tensor, step: int = STEP) -> Tensor:
    return aligned(F.pad(rows.float(), (0, 0, 0, -rows.shape[0] % step)).contiguous())
