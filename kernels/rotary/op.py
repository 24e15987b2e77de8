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
Cost: memory-bound; on a GPU q and k in one launch.

A model computes one table of cosines and sines in fp64 on the CPU and rounds it once. A call looks
its positions up there, so an angle does not depend on the other tokens of the call.
Source: Su et al., RoFormer (2021); the half-split pairing is that of the Hugging Face models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.rotary.rotation_triton import rotary_op

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


def rotary_table(inv_freq: Tensor, num_positions: int, scaling: float = 1.0) -> Tensor:
    """Cosines and sines of positions 0 .. num_positions - 1.

    Args:
        inv_freq: [D/2] fp32 inverse frequencies, on any device.
        num_positions: rows of the table.
        scaling: factor on both (YaRN's attention factor).

    Returns:
        [2, num_positions, D/2] fp32 on the device of inv_freq; index 0 holds cosines, 1 sines.
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
