"""y = x @ weight^T + bias.

Shapes: x [..., K], weight [N, K], bias [N] -> [..., N].
Dtypes and rounding points: fp32, bf16, fp16; fp32 accumulation, bias added in fp32, one rounding to
    the dtype of x.
Order: `matmul` for each output element.
Invariant to: the number of rows, their positions and neighbours.
Varies with: K, N.
Backward: dX = dY @ weight in the `matmul` order (N walked upward), rounded once; dW and dbias by
    `gradient_fold`.
Errors: TypeError on dtypes, ValueError on shapes, devices and autocast.
Cost: see `matmul` and `gradient_fold`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_consistency.kernels.gradient_fold import (
    GradientBuffer,
    fold_columns,
    fold_outer,
    fold_parameter,
)
from rl_consistency.kernels.matmul import row_matmul
from rl_consistency.kernels.operand import require_operands
from rl_consistency.kernels.reduction_order import ReductionOrder

ORDER = ReductionOrder(
    id="linear",
    version=1,
    text=(
        "Each output in the matmul order from zero, then + bias in fp32, then one rounding. "
        "dX in the matmul order over output features. dW and dbias by the gradient fold."
    ),
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grad: GradientBuffer | None = None,
    bias_grad: GradientBuffer | None = None,
) -> Tensor:
    """Affine map of the last dimension, each row on its own.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        weight_grad: buffer that dW is folded into; without one autograd receives dW, folded from
            zero.
        bias_grad: the same for dbias.

    Returns:
        [..., N] in the dtype of x.
    """
    require_operands("linear", x=x, weight=weight, bias=bias)
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; "
            "weight is [out_features, in_features] and x ends in in_features."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; "
            "bias is [out_features]."
        )
    return _Linear.apply(x, weight, bias, weight_grad, bias_grad)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, weight_grad, bias_grad):
        ctx.save_for_backward(x, weight, bias)
        ctx.buffers = (weight_grad, bias_grad)
        y = row_matmul(x.reshape(-1, x.shape[-1]), weight.t())
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        (dy,) = grad_outputs
        x, weight, bias = ctx.saved_tensors
        weight_grad, bias_grad = ctx.buffers
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = row_matmul(rows, weight).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            x_rows = x.reshape(-1, x.shape[-1])
            dweight = fold_parameter(
                weight, weight_grad, lambda g, fresh: fold_outer(g, rows, x_rows, fresh=fresh)
            )
        if ctx.needs_input_grad[2]:
            dbias = fold_parameter(bias, bias_grad, lambda g, fresh: fold_columns(g, rows))
        return dx, dweight, dbias, None, None


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same map in fp64, for accuracy tests only."""
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()
