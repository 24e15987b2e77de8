"""y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension; also of x + residual.

Shapes: x [..., H], weight [H] -> [..., H]. Used for hidden states and, per head, for queries and
    keys (qk-norm).
Dtypes and rounding points: fp32, bf16, fp16 in and out; fp32 inside, one rounding at the end (stock
    rounds twice in bf16). A residual sum is rounded to the dtype before it is normalised, as are
    its two gradients before they are added.
Order: the mean square by the `row_reduction` tree over H; on a GPU by that tree over groups of 8.
Invariant to: the number of rows, their positions and neighbours.
Varies with: H.
Backward: dx row by row (its one sum by the same tree); dweight by `gradient_fold`, a step being 16
    tokens with all their heads.
Errors: TypeError on dtypes, ValueError on shapes, devices and autocast.
Cost: memory-bound; about 3 H extra elementwise operations for the tree. On a GPU one launch
    forward, two backward, every operand read once.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold.columns_triton import fold_step_sums, folded_step_sums
from rl_consistency.kernels.gradient_fold.op import GradientBuffer, fold_columns, fold_parameter
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.rms_norm.wide_triton import (
    rms_norm_bwd_op,
    rms_norm_fwd_op,
)

ORDER = ReductionOrder(
    id="rms_norm",
    version=2,
    cpu=(
        "fp32: s = tree(x*x)/H, r = 1/sqrt(s + eps), y = (x*r)*weight, rounded once. Backward: c "
        "= tree((dy*weight)*(x*r))/H, dx = r*((dy*weight) - (x*r)*c), rounded once; dweight folds "
        "dy*(x*r) by columns, a step being 16 tokens with all their heads. On CUDA: the tree over "
        "H adds element i + 4 to element i of every 8 neighbours, then i + 2, then i + 1, then is "
        "the halving tree over the groups of 8; a step's sum for dweight starts from zero and adds "
        "8 pairs of tokens one after another, each by the halving tree over the pair's rows."
    ),
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rows_per_token: int = 1,
    weight_grad: GradientBuffer | None = None,
) -> Tensor:
    """Root-mean-square normalisation of the last dimension.

    Args:
        x: [..., H].
        weight: [H].
        eps: added to the mean square.
        rows_per_token: rows of one token in x (the number of heads for qk-norm), so that the fold's
            steps fall between tokens.
        weight_grad: buffer that dweight is folded into.

    Returns:
        The shape and dtype of x.
    """
    require_norm("rms_norm", weight, x=x)
    if x.is_cuda:
        return apply(RMSNormCUDAFunction, x, None, weight, eps, rows_per_token, weight_grad)
    return apply(RMSNormFunction, x, weight, eps, rows_per_token, weight_grad)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_grad: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor]:
    """A residual addition and the norm of its sum; the bytes are those of the two ops apart.

    Args:
        x: [..., H].
        residual: [..., H], the shape and dtype of x.
        weight: [H].
        eps: added to the mean square.
        weight_grad: buffer that dweight is folded into.

    Returns:
        (norm of the sum, the sum), each of the shape and dtype of x.
    """
    require_norm("add_rms_norm", weight, x=x, residual=residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)} and x {tuple(x.shape)} must be equal."
        )
    if x.is_cuda:
        return apply(RMSNormCUDAFunction, x, residual, weight, eps, 1, weight_grad)
    total = residual + x
    return rms_norm(total, weight, eps, weight_grad=weight_grad), total


def require_norm(op: str, weight: Tensor, **operands: Tensor) -> None:
    """Check the operands of `rms_norm`, x among them.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, devices or autocast.
    """
    require_operands(op, **operands, weight=weight)
    if weight.shape != operands["x"].shape[-1:]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} does not fit x {tuple(operands['x'].shape)}; "
            "weight is [hidden_size] and x ends in hidden_size."
        )


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, rows_per_token, weight_grad):
        wide = x.float()
        # Division and square root are computed alike in every code path; rsqrt is not.
        rstd = 1.0 / torch.sqrt(tree_sum(wide * wide) / x.shape[-1] + eps).unsqueeze(-1)
        ctx.save_for_backward(x, weight, rstd)
        ctx.rows_per_token, ctx.weight_grad = rows_per_token, weight_grad
        return ((wide * rstd) * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        x, weight, rstd = ctx.saved_tensors
        dy = grad_outputs[0].float()
        normalized = x.float() * rstd
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            weighted = dy * weight.float()
            mean = (tree_sum(weighted * normalized) / x.shape[-1]).unsqueeze(-1)
            dx = (rstd * (weighted - normalized * mean)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = (dy * normalized).reshape(-1, x.shape[-1])
            dweight = fold_parameter(
                weight,
                ctx.weight_grad,
                lambda g, fresh: fold_columns(g, rows, rows_per_token=ctx.rows_per_token),
            )
        return dx, dweight, None, None, None


class RMSNormCUDAFunction(torch.autograd.Function):
    """(y, total) with total = x + residual; without a residual y alone."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, rows_per_token, weight_grad):
        ctx.set_materialize_grads(False)
        y, total, rstd = rms_norm_fwd_op(x, residual, weight, eps)
        ctx.save_for_backward(x if residual is None else total, weight, rstd)
        ctx.rows_per_token, ctx.weight_grad = rows_per_token, weight_grad
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        dy, dtotal = grad_outputs if len(grad_outputs) == 2 else (grad_outputs[0], None)
        x, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal, None, None, None, None
        with_sums = ctx.needs_input_grad[2]
        dx, sums = rms_norm_bwd_op(dy, dtotal, x, weight, rstd, ctx.rows_per_token, with_sums)
        dweight = None
        if with_sums and ctx.weight_grad is None:
            dweight = folded_step_sums(sums, weight.dtype)
        elif with_sums:
            dweight = fold_parameter(
                weight, ctx.weight_grad, lambda g, fresh: fold_step_sums(g, sums)
            )
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None, None


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same formula in fp64, for accuracy tests only."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
