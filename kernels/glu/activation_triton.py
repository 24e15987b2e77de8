"""The gated activations on CUDA, and their arithmetic for kernels that fuse them.

Shapes, dtypes, order, invariance: those of `glu`. Errors: none.
Cost: memory-bound up to about thirty instructions per element. So an element takes one exponential,
    one reciprocal root and no branch.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, contiguous_format, empty_like
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op

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
class Schedule:
    """How programs share the elements; it changes no bit."""

    block: int
    """Elements of one program."""
    warps: int


SCHEDULE = Schedule(1024, 4)
"""The schedule of every shape, but of those that `tune` found another one for."""

CANDIDATES = tuple(
    Schedule(block, warps)
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
) -> Schedule:  # fmt: skip
    """The schedule for gate and up [rows, width]."""
    work = glu_work(direction, dtype, activation, rows, width)
    return choose(device, work, CANDIDATES) or SCHEDULE


def _picked(direction: str, gate: Tensor, activation: str) -> Schedule:
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


def glu_fwd(gate: Tensor, up: Tensor, activation: str, schedule: Schedule | None = None) -> Tensor:
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


def glu_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    schedule: Schedule | None = None,
    *,
    gives_y: bool = False,
) -> tuple[Tensor, ...]:
    """dgate and dup, contiguous, and with `gives_y` the bytes of `glu_fwd` from the same pass."""
    results = tuple(_backward_fake(dy, gate, up, activation, gives_y))
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


def _forward_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return empty_like(gate, memory_format=contiguous_format)


def _backward_fake(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, gives_y: bool
) -> list[Tensor]:
    count = 3 if gives_y else 2
    return [empty_like(gate, memory_format=contiguous_format) for _ in range(count)]


@kernel_op(fake=_forward_fake)
def glu_fwd_op(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`glu_fwd` as a compiler sees it: one opaque call."""
    return glu_fwd(gate, up, activation)


@kernel_op(fake=_backward_fake)
def glu_bwd_op(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, gives_y: bool
) -> list[Tensor]:
    """`glu_bwd` as a compiler sees it: one opaque call."""
    return [*glu_bwd(dy, gate, up, activation, gives_y=gives_y)]
