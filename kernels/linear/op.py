"""y = x @ weight^T + bias.

Shapes: `linear`: x [..., K], weight [N, K], bias [N] -> [..., N]. `linear_qkv`: three weights and
    results. `linear_glu`: activation(x w_gate^T) * (x w_up^T). `glu_linear`: gate and up [..., K]
    in the place of x.
Dtypes and rounding points: fp32, bf16, fp16; fp32 accumulation, bias added in fp32, one rounding to
    the dtype of x.
Order: ORDER below, `linear`.
Invariant to: the number of rows, their positions and neighbours; fused and separate ops.
Varies with: K, N.
Backward: dX = dY @ weight in the `matmul` order (N upward), rounded once; dW and dbias by
    `gradient_fold`. `linear_qkv` and `linear_glu` have none. `glu_linear` keeps no values of `glu`:
    they are computed again for dW, from the same gate and up, by the kernel of their gradients
    where these are wanted too (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
    for one op).
Errors: TypeError on dtypes; ValueError on shapes, devices, autocast, and on `linear_qkv` and
    `linear_glu` where a gradient is wanted.
Cost: see `matmul` and `gradient_fold`. In the backward pass of `glu_linear` R x K elements more are
    written, and as many less are kept between the passes: of a dense decoder layer's activations 13
    to 23 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_columns, fold_outer
from rl_consistency.kernels.linear.few_rows_triton import gate_up_glu_op, qkv_op
from rl_consistency.kernels.linear.schedules import fuses_gate_up, fuses_qkv
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.pointwise.glu import (
    ACTIVATIONS,
    glu,
    glu_gradients,
    glu_gradients_and_values,
    glu_values,
    require_gated,
)

ORDER = ReductionOrder(
    id="linear",
    version=1,
    cpu="""\
y[m, n] = matmul order over K, + bias[n] in fp32, then one rounding
dx[m, k] = matmul order over N, then one rounding
dW, dbias = gradient_fold over tokens
""",
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grad: GradientBuffer | None = None,
    bias_grad: GradientBuffer | None = None,
) -> Tensor:
    """Affine map of the last dimension -> [..., N] in the dtype of x.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        weight_grad: buffer that dW is folded into; without it autograd receives dW, folded from
            zero.
        bias_grad: the same for dbias.
    """
    require_fitting("linear", x, weight, bias)
    return apply(LinearFunction, x, weight, bias, weight_grad, bias_grad)


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
    """The bytes of `linear(glu(gate, up, activation), weight, bias)`, and of its gradients, from
    gate and up [..., K]; the other arguments are those of `linear` and `glu`."""
    require_gated(gate, up, activation)
    require_fitting("glu_linear", gate, weight, bias)
    return apply(GLULinearFunction, gate, up, weight, bias, activation, weight_grad, bias_grad)


def linear_qkv(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of three calls of `linear`, without gradients; few rows on CUDA take one launch.

    x is [..., K], a weight [N_i, K], a bias [N_i] or None; the results are three [..., N_i].
    """
    _require_no_gradient("linear_qkv", x, *weights, *biases)
    for weight, bias in zip(weights, biases, strict=True):
        require_fitting("linear_qkv", x, weight, bias)
    rows = rows_of(x)
    columns = tuple(weight.shape[0] for weight in weights)
    fuses = _in_one_launch(rows, *columns) and fuses_qkv(rows.shape[0], columns, x.dtype)
    if fuses and len({bias is None for bias in biases}) == 1:
        q, k, v = qkv_op(rows, *weights, *biases)
    else:
        q, k, v = (
            matmul_nt(rows, weight, bias=bias, out_dtype=x.dtype)
            for weight, bias in zip(weights, biases, strict=True)
        )
    if rows is not x:
        q, k, v = (y.view(*x.shape[:-1], y.shape[1]) for y in (q, k, v))
    return q, k, v


def linear_glu(x: Tensor, w_gate: Tensor, w_up: Tensor, activation: str = "silu") -> Tensor:
    """The bytes of `glu(linear(x, w_gate), linear(x, w_up))`, without gradients.

    x is [..., K], w_gate and w_up are [N, K], `activation` is one of `glu.ACTIVATIONS`; the result
    is [..., N]. Few rows on CUDA take one launch.
    """
    _require_no_gradient("linear_glu", x, w_gate, w_up)
    require_fitting("linear_glu", x, w_gate, None)
    require_fitting("linear_glu", x, w_up, None)
    if w_gate.shape != w_up.shape:
        raise ValueError(
            f"linear_glu: w_gate {tuple(w_gate.shape)} and w_up {tuple(w_up.shape)} must be equal."
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"linear_glu: activation {activation!r}; allowed: {', '.join(ACTIVATIONS)}."
        )
    rows = x.reshape(-1, x.shape[-1])
    n, tma = w_gate.shape[0], rows.is_cuda and has_tma(rows.device)
    if _in_one_launch(rows, n) and fuses_gate_up(rows.shape[0], n, x.dtype, tma):
        y = gate_up_glu_op(rows, w_gate, w_up, activation)
    else:
        gate = matmul_nt(rows, w_gate, out_dtype=x.dtype)
        y = glu(gate, matmul_nt(rows, w_up, out_dtype=x.dtype), activation)
    return y.view(*x.shape[:-1], w_gate.shape[0])


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] as [R, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _in_one_launch(rows: Tensor, *columns: int) -> bool:
    """Whether a kernel can run at all: on CUDA, with something to compute."""
    return rows.is_cuda and min((*rows.shape, *columns)) > 0


def require_fitting(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check the operands of `linear`; raises what the module's Errors line says."""
    require_operands(op, x=x, weight=weight, bias=bias)
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; "
            "weight is [out_features, in_features] and x ends in in_features."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; "
            "bias is [out_features]."
        )


def _require_no_gradient(op: str, *operands: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        raise ValueError(
            f"{op}: computes no gradients. Call it under torch.no_grad(), or use linear()."
        )


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, weight_grad, bias_grad):
        ctx.save_for_backward(x, weight, bias)
        ctx.buffers = (weight_grad, bias_grad)
        y = matmul_nt(rows_of(x), weight, bias=bias, out_dtype=x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        (dy,) = grad_outputs
        x, weight, bias = ctx.saved_tensors
        rows, dx = rows_of(dy), None
        if ctx.needs_input_grad[0]:
            dx = matmul_nn(rows, weight, out_dtype=x.dtype)
            dx = dx if x.dim() == 2 else dx.view(x.shape)
        return dx, *_folded(ctx, rows, lambda: rows_of(x), weight, bias, at=1), None, None


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
        dy = rows_of(grad_outputs[0])
        dgate = dup = x = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dx = matmul_nn(dy, weight, out_dtype=gate.dtype).view(gate.shape)
            if ctx.needs_input_grad[2]:
                dgate, dup, x = glu_gradients_and_values(dx, gate, up, ctx.activation)
            else:
                dgate, dup = glu_gradients(dx, gate, up, ctx.activation)
            del dx  # its memory may be dW's

        def values() -> Tensor:
            return rows_of(glu_values(gate, up, ctx.activation) if x is None else x)

        return dgate, dup, *_folded(ctx, dy, values, weight, bias, at=2), None, None, None


def _folded(
    ctx: Any, dy: Tensor, x: Callable[[], Tensor], weight: Tensor, bias: Tensor, *, at: int
) -> tuple[Tensor | None, Tensor | None]:
    """dW and dbias, each where autograd wants it; the weight is the function's input `at`."""
    weight_grad, bias_grad = ctx.buffers
    wanted = ctx.needs_input_grad[at:]
    dweight = folded_weight(ctx, dy, x, weight, weight_grad) if wanted[0] else None
    if not wanted[1]:
        return dweight, None
    columns = lambda g, fresh: fold_columns(g, dy, fresh=fresh)  # noqa: E731
    return dweight, fold_parameter(ctx, bias, bias_grad, columns, overwrites=True)


def folded_weight(
    ctx: Any, dy: Tensor, x: Callable[[], Tensor], weight: Tensor, buffer: GradientBuffer | None
) -> Tensor | None:
    """What a backward function returns for the weight of rows [R, K], which `x` gives where they
    are folded, with dy [R, N]."""
    return fold_parameter(
        ctx, weight, buffer, lambda g, fresh: fold_outer(g, dy, x(), fresh=fresh), overwrites=True
    )


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The map of `linear` in fp64, for accuracy tests only."""
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()
