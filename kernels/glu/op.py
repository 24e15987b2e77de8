"""y = activation(gate) * up: SwiGLU (silu) and GeGLU (gelu, gelu_tanh).

Shapes: gate [..., F], up [..., F] -> [..., F].
Dtypes and rounding points: fp32, bf16, fp16 in and out; fp32 inside, one rounding at the end (stock
    rounds the activation as well).
Order: ORDER below, `glu`. Nothing is summed; the order pins each device's formula.
Invariant to: an element's position and the tensor's size. On a CPU this rules out `torch.sigmoid`,
    `silu`, `gelu(tanh)` and `exp2`: their vectorized body and scalar tail differ in bits. Those of
    exp and erf were measured to agree.
Varies with: nothing.
Backward: elementwise, fp32 inside, one rounding.
Errors: TypeError on dtypes, ValueError on shapes, activations, devices and autocast.
Cost: memory-bound; on a GPU one launch each way.

Source: Shazeer, GLU Variants Improve Transformer (2020).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.glu.activation_triton import ACTIVATIONS, glu_bwd_op, glu_fwd_op

ORDER = ReductionOrder(
    id="glu",
    version=2,
    cpu=(
        "in fp32; z = x for silu, 2*sqrt(2/pi) * (x + 0.044715*x^3) for gelu_tanh\n"
        "silu, gelu_tanh: a = x / (1 + exp(-z))\n"
        "gelu:            a = (0.5*x) * (1 + erf(x/sqrt(2)))\n"
        "y = a(gate) * up, rounded once to the dtype"
    ),
    cuda=(
        "in fp32; z and gelu as on a CPU\n"
        "silu, gelu_tanh: e = exp(-|z|);  a = (x if z >= 0 else x*e) / (1 + e)\n"
        "exp:      exp2 of a product with log2(e) in two parts; 0 below exp(-88)\n"
        "quotient: q = a * rsqrt(1 + e)^2, then one fused correction\n"
        "y = a(gate) * up, rounded once to the dtype"
    ),
)

_Z_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
_Z_CUBIC = 0.044715


def glu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, elementwise: gate and up [..., F] -> [..., F] of the same dtype.

    `activation` is one of `ACTIVATIONS`.
    """
    require_gated(gate, up, activation)
    return apply(GLUFunction, gate, up, activation)


def require_gated(gate: Tensor, up: Tensor, activation: str) -> None:
    """Check the operands of `glu`; raises what the module's Errors line says."""
    require_operands("glu", gate=gate, up=up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu: activation {activation!r}; allowed: {', '.join(ACTIVATIONS)}.")
    if gate.shape != up.shape:
        raise ValueError(f"glu: gate {tuple(gate.shape)} and up {tuple(up.shape)} must be equal.")


class GLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return glu_values(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        gate, up = ctx.saved_tensors
        return *glu_gradients(grad_outputs[0], gate, up, ctx.activation), None


def glu_values(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The values of `glu`, which autograd does not record."""
    if gate.is_cuda:
        return glu_fwd_op(gate, up, activation)
    value, _ = _activate(gate.float(), activation)
    return (value * up.float()).to(gate.dtype)


def glu_gradients(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """dgate and dup, rounded once to the dtype of gate; dy [..., F] may be fp32 instead."""
    if gate.is_cuda:
        dgate, dup = glu_bwd_op(dy, gate, up, activation, False)
        return dgate, dup
    dy = dy.float()
    value, derivative = _activate(gate.float(), activation)
    return (dy * up.float() * derivative).to(gate.dtype), (dy * value).to(up.dtype)


def glu_gradients_and_values(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dgate, dup, and the bytes of `glu_values`; on a GPU in one pass."""
    if gate.is_cuda:
        dgate, dup, values = glu_bwd_op(dy, gate, up, activation, True)
        return dgate, dup, values
    return *glu_gradients(dy, gate, up, activation), glu_values(gate, up, activation)


def _activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation and its derivative, fp32."""
    if activation == "silu":
        return _sigmoid_gated(x, x, 1.0)
    if activation == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
        density = torch.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))
        return x * cdf, cdf + x * density
    z = _Z_SCALE * (x + _Z_CUBIC * (x * x * x))
    slope = _Z_SCALE * (1.0 + 3.0 * _Z_CUBIC * (x * x))
    return _sigmoid_gated(x, z, slope)


def _sigmoid_gated(x: Tensor, z: Tensor, slope: Tensor | float) -> tuple[Tensor, Tensor]:
    """x * sigmoid(z) and its derivative; `slope` is dz/dx."""
    denominator = 1.0 + torch.exp(-z)
    value = x / denominator
    # 1/(1 + exp(z)) is 1 - sigmoid(z) without cancellation.
    return value, 1.0 / denominator + value * (1.0 / (1.0 + torch.exp(z))) * slope


def glu_reference(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """The formula of `glu` in fp64, for accuracy tests only."""
    wide = gate.double()
    if activation == "silu":
        return F.silu(wide) * up.double()
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return F.gelu(wide, approximate=approximate) * up.double()
