"""y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Shapes: x [..., H], weight [H] -> [..., H]. Used for hidden states and, per head, for queries and
    keys (qk-norm).
Dtypes and rounding points: fp32, bf16, fp16 in and out; fp32 inside, one rounding at the end (stock
    rounds twice in bf16).
Order: the mean square by the `row_reduction` tree over H.
Invariant to: the number of rows, their positions and neighbours.
Varies with: H.
Backward: dx row by row (its one sum by the same tree); dweight by `gradient_fold`, a step being 16
    tokens with all their heads.
Errors: TypeError on dtypes, ValueError on shapes, devices and autocast.
Cost: memory-bound; about 3 H extra elementwise operations for the tree.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_consistency.kernels.gradient_fold import GradientBuffer, fold_columns, fold_parameter
from rl_consistency.kernels.operand import require_operands
from rl_consistency.kernels.reduction_order import ReductionOrder
from rl_consistency.kernels.row_reduction import tree_sum

ORDER = ReductionOrder(
    id="rms_norm",
    version=1,
    text=(
        "fp32: s = tree(x*x)/H, r = 1/sqrt(s + eps), y = (x*r)*weight, rounded once. Backward: c "
        "= tree((dy*weight)*(x*r))/H, dx = r*((dy*weight) - (x*r)*c), rounded once; dweight folds "
        "dy*(x*r) by columns, a step being 16 tokens with all their heads."
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
    require_operands("rms_norm", x=x, weight=weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; "
            "weight is [hidden_size] and x ends in hidden_size."
        )
    return _RMSNorm.apply(x, weight, eps, rows_per_token, weight_grad)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, rows_per_token, weight_grad):
        wide = x.float()
        # Division and square root round correctly in every code path; rsqrt is an approximation.
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


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same formula in fp64, for accuracy tests only."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
