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
Cost: memory-bound; on a GPU one launch each way, of up to about thirty instructions per element: an
    element takes one exponential, one reciprocal root and no branch. Kernels that fuse the op take
    its arithmetic from here (`glu_value`, `activate_with_derivative`).

Source: Shazeer, GLU Variants Improve Transformer (2020).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, contiguous_format, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import cdiv, remembered
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.core.torch_op import kernel_op

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

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Kernels take an activation as its index here."""

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500211e-08)
MAGIC = tl.constexpr(12583039.0)  # 1.5 * 2**23 + 127: its last bits are a biased exponent
FLOOR = tl.constexpr(-88.02969193111305)  # -127 * log(2)
SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 * pi)
Z_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
Z_CUBIC = tl.constexpr(0.044715)


@dataclass(frozen=True)
class GluSchedule:
    """How programs share the elements; it changes no bit."""

    block: int
    """Elements of one program."""
    warps: int


SCHEDULE = GluSchedule(1024, 4)
"""The schedule of every shape, but of those that `tune` found another one for."""

CANDIDATES = tuple(
    GluSchedule(block, warps)
    for block in (512, 1024, 2048, 4096, 8192)
    for warps in (2, 4, 8)
    if 8 <= block // (32 * warps) <= 64
)
"""Schedules to time and to compare."""


def glu_work(direction: str, dtype: torch.dtype, activation: str, rows: int, width: int) -> str:
    """The work of `pick`, as `tune` names it; `direction` is "forward" or "backward"."""
    return work_name("glu", direction, dtype, activation, f"w{width}", rows=rows)


@picked_once
def pick(
    direction: str, dtype: torch.dtype, activation: str, rows: int, width: int,
    device: torch.device,
) -> GluSchedule:  # fmt: skip
    """The schedule for gate and up [rows, width]."""
    work = glu_work(direction, dtype, activation, rows, width)
    return choose(device, work, CANDIDATES) or SCHEDULE


def _picked(direction: str, gate: Tensor, activation: str) -> GluSchedule:
    width = gate.shape[-1] if gate.dim() else 1
    return pick(direction, gate.dtype, activation, gate.numel() // width, width, gate.device)


@triton.jit
def exp_negative(a):
    """exp of fp32 a <= 0, about 1 ulp; 0 below -88, where a result would be denormal."""
    a = tl.maximum(a, FLOOR)
    shifted = tl.fma(a, LOG2E, MAGIC)
    whole = shifted - MAGIC
    rest = tl.fma(a, LOG2E_LOW, tl.fma(a, LOG2E, -whole))
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(rest) * power


@triton.jit
def sigmoid_terms(z):
    """e = exp(-|z|), d = 1 + e and r, about 1/d. sigmoid(|z|) is 1/d and sigmoid(-|z|) is e/d."""
    e = exp_negative(-tl.abs(z))
    d = 1.0 + e
    root = tl.rsqrt(d)
    return e, d, root * root


@triton.jit
def quotient(a, d, r):
    """a / d for d in [1, 2], given r, about 1/d; rounded correctly except at rare ties."""
    q = a * r
    q = tl.fma(tl.fma(-d, q, a), r, q)
    # Correcting an infinite quotient would give NaN. Its gate is so large that d = 1.
    return tl.where(d == 1.0, a, q)


@triton.jit
def _tanh_argument(x):
    return Z_SCALE * (x + Z_CUBIC * (x * x * x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of fp32 x: 0 silu, 1 gelu, 2 gelu_tanh."""
    if ACTIVATION == 1:
        return (0.5 * x) * (1.0 + tl.math.erf(x * SQRT_HALF))
    z = x if ACTIVATION == 0 else _tanh_argument(x)
    e, d, r = sigmoid_terms(z)
    return quotient(tl.where(z >= 0.0, x, x * e), d, r)


@triton.jit
def activate_with_derivative(x, ACTIVATION: tl.constexpr):
    """The bits of `activate`, and the derivative."""
    if ACTIVATION == 1:
        doubled = 1.0 + tl.math.erf(x * SQRT_HALF)
        density = exp_negative(-0.5 * x * x) * DENSITY
        return (0.5 * x) * doubled, 0.5 * doubled + x * density
    z = x if ACTIVATION == 0 else _tanh_argument(x)
    e, d, r = sigmoid_terms(z)
    positive = z >= 0.0
    value = quotient(tl.where(positive, x, x * e), d, r)
    high = quotient(tl.full(d.shape, 1.0, tl.float32), d, r)
    low = quotient(e, d, r)
    # high + low = 1, so each equals 1 minus the other, but without cancellation.
    slope = value * tl.where(positive, low, high)
    if ACTIVATION == 2:
        slope = slope * (Z_SCALE * (1.0 + (3.0 * Z_CUBIC) * (x * x)))
    return value, tl.where(positive, high, low) + slope


@triton.jit
def glu_value(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, all fp32; the caller rounds once."""
    return activate(gate, ACTIVATION) * up


@triton.jit
def glu_tile(gate, up, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """The gated activation of both products, rounded to DTYPE first, as separate ops do."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    return glu_value(gate, up, ACTIVATION).to(DTYPE)


@remembered
@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < N
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    y = glu_value(gate, up, ACTIVATION)
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=inside)


@remembered
@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, N, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr, GIVES_Y: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < N
    dy = tl.load(dy_ptr + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    value, derivative = activate_with_derivative(gate, ACTIVATION)
    dtype = dgate_ptr.dtype.element_ty
    tl.store(dgate_ptr + index, ((dy * up) * derivative).to(dtype), mask=inside)
    tl.store(dup_ptr + index, (dy * value).to(dtype), mask=inside)
    if GIVES_Y:
        tl.store(y_ptr + index, (value * up).to(dtype), mask=inside)


def _forward_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return empty_like(gate, memory_format=contiguous_format)


def glu_fwd(
    gate: Tensor, up: Tensor, activation: str, schedule: GluSchedule | None = None
) -> Tensor:
    """activation(gate) * up, contiguous."""
    y = _forward_fake(gate, up, activation)
    if y.numel() == 0:
        return y
    schedule, overlap = schedule or _picked("forward", gate, activation), has_tma(gate.device)
    _forward_kernel[(cdiv(y.numel(), schedule.block),)](
        gate.contiguous(), up.contiguous(), y, y.numel(),
        ACTIVATION=ACTIVATIONS.index(activation), BLOCK=schedule.block, OVERLAP=overlap,
        launch_pdl=overlap, num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _backward_fake(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, gives_y: bool
) -> list[Tensor]:
    count = 3 if gives_y else 2
    return [empty_like(gate, memory_format=contiguous_format) for _ in range(count)]


def glu_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    gives_y: bool = False,
    schedule: GluSchedule | None = None,
) -> list[Tensor]:
    """dgate and dup, contiguous, and with `gives_y` the bytes of `glu_fwd` from the same pass."""
    results = _backward_fake(dy, gate, up, activation, gives_y)
    dgate, dup = results[:2]
    if dgate.numel() == 0:
        return results
    schedule = schedule or _picked("backward", gate, activation)
    _backward_kernel[(cdiv(dgate.numel(), schedule.block),)](
        dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, results[-1],
        dgate.numel(), ACTIVATION=ACTIVATIONS.index(activation), BLOCK=schedule.block,
        GIVES_Y=gives_y, num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return results


glu_fwd_op = kernel_op(fake=_forward_fake, name="glu_fwd_op")(glu_fwd)
glu_bwd_op = kernel_op(fake=_backward_fake, name="glu_bwd_op")(glu_bwd)


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
    scale, cubic = Z_SCALE.value, Z_CUBIC.value
    z = scale * (x + cubic * (x * x * x))
    slope = scale * (1.0 + 3.0 * cubic * (x * x))
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
