"""y[t] = weight[token[t]].

Shapes: token_ids [...] int64, weight [V, H] -> [..., H].
Dtypes and rounding points: a copy; the gradient is accumulated in fp32.
Order: ORDER below, `embedding`.
Invariant to: everything except the token itself.
Varies with: nothing.
Backward: `fold_rows` of `gradient_fold`; `padding_idx` receives no gradient.
Errors: TypeError on dtypes, ValueError on devices, autocast and ids outside the table. Without the
    check of the ids (`check_ids=False`, CUDA graph capture, a compiled graph), an id outside the
    table gives a row of NaN on CUDA, so that the fault shows.
Cost: memory-bound. On CUDA the check makes the host wait once per call.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_rows

ORDER = ReductionOrder(
    id="embedding",
    version=1,
    cpu="y[t] = weight[token[t]]\nfor t upward: dweight[token[t]] += dy[t], in fp32",
)


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


def embedding(
    token_ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    weight_grad: GradientBuffer | None = None,
    check_ids: bool = True,
) -> Tensor:
    """Look up one row per token -> [..., H] in the dtype of weight.

    Args:
        token_ids: [...] int64.
        weight: [V, H].
        padding_idx: the token whose row receives no gradient.
        weight_grad: buffer that the gradient is folded into.
        check_ids: whether to check the ids; False if the caller knows they are valid.
    """
    require_operands("embedding", weight=weight)
    if token_ids.dtype != torch.int64:
        raise TypeError(f"embedding: token ids are {token_ids.dtype}; they must be int64.")
    if token_ids.device != weight.device:
        raise ValueError(
            f"embedding: token ids are on {token_ids.device} but the table is on {weight.device}; "
            "move them to one device."
        )
    reads = check_ids and token_ids.numel() > 0 and not torch.compiler.is_compiling()
    if reads and not (token_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        low, high = (int(v) for v in token_ids.aminmax())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(
                f"embedding: token ids span [{low}, {high}], the table has {weight.shape[0]} rows. "
                "Use the tokenizer that belongs to the model."
            )
    return apply(_Embedding, token_ids, weight, padding_idx, weight_grad)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token_ids, weight, padding_idx, weight_grad):
        ctx.save_for_backward(token_ids, weight)
        ctx.padding_idx, ctx.weight_grad = padding_idx, weight_grad
        flat = token_ids.flatten()
        rows = embedding_fwd(flat, weight) if weight.is_cuda else weight.index_select(0, flat)
        return rows.view(*token_ids.shape, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        token_ids, weight = ctx.saved_tensors
        rows = grad_outputs[0].reshape(-1, weight.shape[1])
        index = token_ids.flatten()
        if ctx.padding_idx is not None:
            index = index.masked_fill(index == ctx.padding_idx, -1)
        gradient = fold_parameter(
            ctx, weight, ctx.weight_grad, lambda g, fresh: fold_rows(g, index, rows)
        )
        return None, gradient, None, None


def embedding_reference(token_ids: Tensor, weight: Tensor) -> Tensor:
    """The gather of `embedding` in fp64, for accuracy tests only."""
    return weight.double()[token_ids]
