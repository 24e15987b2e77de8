"""y = glu(gate, up) @ weight^T + bias, without keeping what `glu` gives for the backward pass.

Shapes: gate and up [..., K], weight [N, K], bias [N] -> [..., N].
Dtypes, rounding points and order: those of `glu`, then of `linear`, in both passes; the same bytes
    as the two ops.
Invariant to: what both are invariant to.
Varies with: K, N.
Backward: the values of `glu` are computed again for dW, from the same gate and up, by the kernel of
    their gradients where these are wanted too.
Errors: those of `glu` and `linear`.
Cost: R x K elements more are written in backward, and as many less kept between the passes: of a
    dense decoder layer's activations 13 to 23 %.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), for one op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.op import folded_bias, folded_weight, require_fitting, rows_of
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.pointwise.glu import (
    glu_gradients,
    glu_gradients_and_values,
    glu_values,
    require_gated,
)


def glu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    weight_grad: GradientBuffer | None = None,
    bias_grad: GradientBuffer | None = None,
) -> Tensor:
    """The bytes of `linear(glu(gate, up, activation), weight, bias)`, and of its gradients.

    Args:
        gate: [..., K].
        up: as gate.
        weight: [N, K].
        bias: [N] or None.
        activation: one of `glu.ACTIVATIONS`.
        weight_grad: buffer that dW is folded into, as in `linear`.
        bias_grad: the same for dbias.

    Returns:
        [..., N] in the dtype of gate.
    """
    require_gated(gate, up, activation)
    require_fitting("glu_linear", gate, weight, bias)
    return apply(GLULinearFunction, gate, up, weight, bias, activation, weight_grad, bias_grad)


class GLULinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight, bias, activation, weight_grad, bias_grad):
        ctx.save_for_backward(gate, up, weight, bias)
        ctx.activation, ctx.buffers = activation, (weight_grad, bias_grad)
        x = rows_of(glu_values(gate, up, activation))
        y = matmul_nt(x, weight, bias=bias, out_dtype=gate.dtype)
        return y.view(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        gate, up, weight, bias = ctx.saved_tensors
        weight_grad, bias_grad = ctx.buffers
        dy = rows_of(grad_outputs[0])
        dgate = dup = dweight = dbias = x = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dx = matmul_nn(dy, weight, out_dtype=gate.dtype).view(gate.shape)
            if ctx.needs_input_grad[2]:
                dgate, dup, x = glu_gradients_and_values(dx, gate, up, ctx.activation)
            else:
                dgate, dup = glu_gradients(dx, gate, up, ctx.activation)
            del dx  # its memory may be dW's
        if ctx.needs_input_grad[2]:

            def values() -> Tensor:
                return rows_of(glu_values(gate, up, ctx.activation) if x is None else x)

            dweight = folded_weight(ctx, dy, values, weight, weight_grad)
        if ctx.needs_input_grad[3]:
            dbias = folded_bias(ctx, dy, bias, bias_grad)
        return dgate, dup, dweight, dbias, None, None, None
