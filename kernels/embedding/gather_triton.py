"""The embedding's gather on CUDA: rows of a table, copied.

Shapes, dtypes, order, invariance: those of `embedding`.
Errors: none. A token outside the table gives a row of NaN, so that the fault shows even where the
    host cannot check the ids (graph capture).
Cost: memory-bound; 16-byte loads and stores.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op


@remembered
@triton.jit
def _gather_kernel(
    id_ptr, weight_ptr, y_ptr, V, H, stride_v, stride_h, DENSE: tl.constexpr, BLOCK_H: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(id_ptr + token)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    known = (row >= 0) & (row < V)
    offsets = columns if DENSE else columns.to(tl.int64) * stride_h
    value = tl.load(weight_ptr + row * stride_v + offsets, mask=inside & known, other=float("nan"))
    tl.store(y_ptr + token * H + columns, value, mask=inside)


@kernel_op(fake=lambda ids, weight: weight.new_empty((ids.shape[0], weight.shape[1])))
def embedding_fwd(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids [T] int64, weight [V, H] -> [T, H]."""
    tokens, hidden = token_ids.shape[0], weight.shape[1]
    y = weight.new_empty((tokens, hidden))
    if y.numel() == 0:
        return y
    block = min(next_power_of_2(hidden), 2048)
    _gather_kernel[(tokens, cdiv(hidden, block))](
        token_ids.contiguous(), weight, y, weight.shape[0], hidden, *weight.stride(),
        DENSE=weight.stride(1) == 1, BLOCK_H=block, num_warps=4 if block >= 1024 else 1,
    )  # fmt: skip
    return y
