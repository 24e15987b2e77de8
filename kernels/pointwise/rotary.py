"""Rotary position embedding of queries and keys: (a, b) -> (a cos - b sin, b cos + a sin).

Shapes: q [T, H, D], k [T, Hkv, D], cos and sin [T, D/2] -> rotated q and k. Element i of the first
    half pairs with i + D/2.
Dtypes and rounding points: q and k in fp32, bf16, fp16; cos and sin fp32; two products and one sum,
    each rounded to fp32 (no fused multiply-add), then one rounding to the dtype.
Order: ORDER below, `rotary`. A CPU and a GPU give the same bytes.
Invariant to: everything except a token's own values and position.
Varies with: nothing.
Backward: the inverse rotation, with the same rounding points.
Errors: TypeError on dtypes, ValueError on shapes, devices and autocast.
Cost: memory-bound; on a GPU q and k in one launch, which reads cosines and sines once per token.

A model computes one table of cosines and sines in fp64 on the CPU and rounds it once. A call looks
its positions up there, so an angle does not depend on the other tokens of the call.
Source: Su et al., RoFormer (2021); the half-split pairing is that of the Hugging Face models.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, contiguous_format, empty_like

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.device import dense_rows
from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.core.torch_op import kernel_op

ORDER = ReductionOrder(
    id="rotary",
    version=1,
    cpu=(
        "angle = position * inv_freq, in fp64\n"
        "cos = fp32(scaling * cos(angle));  sin = fp32(scaling * sin(angle))\n"
        "y1 = x1*cos - x2*sin;  y2 = x2*cos + x1*sin\n"
        "every product and sum rounded to fp32, y1 and y2 once to the dtype"
    ),
)


@dataclass(frozen=True)
class RotarySchedule:
    """How programs share the tokens; it changes no bit."""

    tokens: int
    """Tokens of one program."""
    warps: int
    heads: int = 16
    """Heads that a program holds at once."""


SCHEDULE = RotarySchedule(1, 4)
"""The schedule of every shape, but of those that `tune` found another one for."""

CANDIDATES = tuple(
    RotarySchedule(tokens, warps, heads)
    for tokens in (1, 2, 4)
    for warps in (4, 8)
    for heads in (8, 16)
)
"""Schedules to time and to compare."""


def rotary_work(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> str:
    """The work of `pick`, as `tune` names it."""
    return work_name("rotary", dtype, f"h{heads}+{kv_heads}", f"d{dim}", rows=tokens)


@picked_once
def pick(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> RotarySchedule:
    """The schedule for q [tokens, heads, dim] and k [tokens, kv_heads, dim]."""
    work = rotary_work(dtype, tokens, heads, kv_heads, dim)
    return choose(device, work, CANDIDATES) or SCHEDULE


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, token, num_tokens, cos, sin, stride_token, stride_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """All heads of a program's tokens, HEADS at a time."""
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    for first in tl.static_range(0, NUM_HEADS, HEADS):
        head = first + tl.arange(0, HEADS)[None, :, None]
        inside = (token < num_tokens) & (head < NUM_HEADS) & (column < HALF)
        read = x_ptr + token * stride_token + head * stride_head + column
        x1 = tl.load(read, mask=inside, other=0.0).to(tl.float32)  # [TOKENS, HEADS, BLOCK_HALF]
        x2 = tl.load(read + HALF, mask=inside, other=0.0).to(tl.float32)
        written = out_ptr + (token * NUM_HEADS + head) * (2 * HALF) + column
        dtype = out_ptr.dtype.element_ty
        tl.store(written, (x1 * cos - x2 * sin).to(dtype), mask=inside)
        tl.store(written + HALF, (x2 * cos + x1 * sin).to(dtype), mask=inside)


@remembered
@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, num_tokens, q_token, q_head, k_token,
    k_head, cos_token, sin_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS_OF_Q: tl.constexpr, HEADS_OF_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    inside = (token < num_tokens) & (column < HALF)  # [TOKENS, 1, BLOCK_HALF]
    cos = tl.load(cos_ptr + token * cos_token + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * sin_token + column, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    _rotate_heads(q_ptr, q_out_ptr, token, num_tokens, cos, sin, q_token, q_head, Q_HEADS, HALF,
                  TOKENS, HEADS_OF_Q, BLOCK_HALF)  # fmt: skip
    _rotate_heads(k_ptr, k_out_ptr, token, num_tokens, cos, sin, k_token, k_head, K_HEADS, HALF,
                  TOKENS, HEADS_OF_K, BLOCK_HALF)  # fmt: skip


def rotary_fwd(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool,
    schedule: RotarySchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, Hkv, D] by cos, sin [T, D/2]; backwards for `inverse`."""
    q_out, k_out = _rotary_fake(q, k, cos, sin, inverse)
    if cos.numel() == 0 or q.numel() + k.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = dense_rows(q), dense_rows(k), dense_rows(cos), dense_rows(sin)
    num_tokens, half = cos.shape
    q_heads, k_heads = q.shape[1], k.shape[1]
    if schedule is None:
        schedule = pick(q.dtype, num_tokens, q_heads, k_heads, 2 * half, q.device)
    at_once = schedule.heads
    _rotary_kernel[(cdiv(num_tokens, schedule.tokens),)](
        q, k, cos, sin, q_out, k_out, num_tokens, *q.stride()[:2], *k.stride()[:2], cos.stride(0),
        sin.stride(0),
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, INVERSE=inverse, TOKENS=schedule.tokens,
        HEADS_OF_Q=min(at_once, next_power_of_2(q_heads)),
        HEADS_OF_K=min(at_once, next_power_of_2(k_heads)), BLOCK_HALF=next_power_of_2(half),
        num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def _rotary_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    rotated = empty_like(q, memory_format=contiguous_format)
    return rotated, empty_like(k, memory_format=contiguous_format)


rotary_op = kernel_op(fake=_rotary_fake, name="rotary_op")(rotary_fwd)


def rotary_table(inv_freq: Tensor, num_positions: int, scaling: float = 1.0) -> Tensor:
    """Cosines and sines of positions 0 .. num_positions - 1, times `scaling` (YaRN's attention
    factor).

    inv_freq is [D/2] fp32, inverse frequencies on any device; the result is [2, num_positions, D/2]
    fp32 there, first cosines, then sines.
    """
    # On the CPU for every device: a GPU's fp64 cosine may round differently.
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = positions[:, None] * inv_freq.cpu().double()[None, :]
    return (torch.stack([angles.cos(), angles.sin()]) * scaling).float().to(inv_freq.device)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and k [T, Hkv, D], rotated by cos and sin [T, D/2] fp32, in their dtype."""
    require_rotary(q, k, cos, sin)
    return apply(RotaryFunction, q, k, cos, sin)


def require_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Check the operands of `rotary`; raises what the module's Errors line says."""
    require_operands("rotary", q=q, k=k)
    of_q, of_k = q.shape, k.shape
    fits = len(of_q) == len(of_k) == 3 and of_q[0] == of_k[0] and of_q[2] == of_k[2]
    if not fits or of_q[2] % 2:
        raise ValueError(
            f"rotary: q {tuple(q.shape)} and k {tuple(k.shape)}; both are [tokens, heads, "
            "head_dim] with the same tokens and the same even head_dim."
        )
    expected = (of_q[0], of_q[2] // 2)
    if cos.shape != expected or sin.shape != expected:
        raise ValueError(
            f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be {expected}: "
            "one row per token, head_dim / 2 columns."
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"rotary: cos is {cos.dtype}, sin is {sin.dtype}; both must be float32.")
    if not cos.device == sin.device == q.device:
        raise ValueError(
            f"rotary: cos is on {cos.device}, sin on {sin.device}, q on {q.device}; move them to "
            "one device."
        )


class RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate_both(q, k, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        dq, dk = grad_outputs
        cos, sin = ctx.saved_tensors
        return *_rotate_both(dq, dk, cos, sin, inverse=True), None, None


def _rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return rotary_op(q, k, cos, sin, inverse)
    if inverse:
        sin = -sin
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def rotary_reference(x: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """q or k [T, H, D], rotated in fp64; for accuracy tests only."""
    angles = positions.double()[:, None, None] * inv_freq.double()
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
