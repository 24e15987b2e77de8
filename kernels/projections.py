"""What a decoder layer computes around its attention, as one autograd function before it and one
after: projections with their head norms and rotation, and the gated MLP.

Shapes: `attention_inputs`: x [..., K] of T rows -> q [T, H, D], k and v [T, Hkv, D]. `gated_mlp`:
    x [..., K] -> [..., N].
Dtypes and rounding points: those of `linear`, `rms_norm`, `rotary` and `glu`.
Order: those of the four ops.
Invariant to: as the ops; the bytes are theirs, one after another, forward and backward.
Varies with: as the ops.
Backward: that of each op, the last one first; the parts of dx are added from the last projection's
    to the first's, each sum rounded, as autograd adds them.
Errors: those of the ops. Not for a compiler to trace: it is to see the ops.
Cost: that of the ops, less the host's time for a call of a module and of autograd for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_consistency.kernels.glu import GLUFunction, require_gated
from rl_consistency.kernels.gradient_fold import GradientBuffer
from rl_consistency.kernels.linear import LinearFunction, require_fitting
from rl_consistency.kernels.recording import Part, apply, in_reverse, keep, once_differentiable
from rl_consistency.kernels.rms_norm import RMSNormCUDAFunction, RMSNormFunction, require_norm
from rl_consistency.kernels.rotary import RotaryFunction, require_rotary


class Projection(NamedTuple):
    """What `linear` takes beside x."""

    weight: Tensor
    """[N, K]."""
    bias: Tensor | None
    """[N]."""
    weight_grad: GradientBuffer | None
    bias_grad: GradientBuffer | None


class HeadNorm(NamedTuple):
    """What `rms_norm` takes beside the heads of a projection."""

    weight: Tensor
    """[D]."""
    eps: float
    rows_per_token: int
    weight_grad: GradientBuffer | None


def attention_inputs(
    x: Tensor,
    projections: tuple[Projection, Projection, Projection],
    norms: tuple[HeadNorm, ...],
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all rows, queries and keys normed and rotated.

    Args:
        x: [..., K], T rows.
        projections: of queries, keys and values, each to heads * head_dim columns.
        norms: of the heads of queries and of keys; empty for none.
        cos: [T, D/2] fp32.
        sin: [T, D/2] fp32.
        head_dim: D.

    Returns:
        q [T, H, D], k [T, Hkv, D], v [T, Hkv, D].
    """
    operands = [operand for part in (*projections, *norms) for operand in part]
    return apply(_AttentionInputs, x.reshape(-1, x.shape[-1]), cos, sin, head_dim, *operands)


def gated_mlp(
    x: Tensor, gate: Projection, up: Projection, down: Projection, activation: str = "silu"
) -> Tensor:
    """down(glu(gate(x), up(x))).

    Args:
        x: [..., K].
        gate: to F columns.
        up: to F columns.
        down: from F columns to N.
        activation: one of `glu.ACTIVATIONS`.

    Returns:
        [..., N].
    """
    y = apply(_GatedMLP, x.reshape(-1, x.shape[-1]), activation, *gate, *up, *down)
    return y.view(*x.shape[:-1], y.shape[1])


class _AttentionInputs(torch.autograd.Function):
    """Parts: projections of q, k and v; norms of q and k, if any; the rotation."""

    @staticmethod
    def forward(ctx, x, cos, sin, head_dim, *operands):
        of_q, of_k, of_v, *norms = _in_fours(operands)
        parts = [Part() for _ in range(4 + len(norms))]
        q, k, v = (
            _project(part, x, *of).view(x.shape[0], of[0].shape[0] // head_dim, head_dim)
            for part, of in zip(parts[:3], (of_q, of_k, of_v), strict=True)
        )
        if norms:
            q, k = _norm(parts[3], q, *norms[0]), _norm(parts[4], k, *norms[1])
        require_rotary(q, k, cos, sin)
        q, k = RotaryFunction.forward(parts[-1], q, k, cos, sin)
        keep(ctx, parts)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        dq, dk, dv = grad_outputs
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        of_q, of_k, of_v, *norms = _in_fours(needs)
        parts = in_reverse(ctx)
        dq, dk, *_ = RotaryFunction.backward(next(parts), dq, dk)
        gradients: list[Tensor | None] = []
        if norms:
            dk, of_k_norm = _norm_backward(next(parts), dk, norms[1])
            dq, of_q_norm = _norm_backward(next(parts), dq, norms[0])
            gradients = [*of_q_norm, *of_k_norm]
        dx = None
        for dy, of in ((dv, of_v), (dk, of_k), (dq, of_q)):
            dx, found = _project_backward(next(parts), dy.flatten(1), needs_x, of, dx)
            gradients = [*found, *gradients]
        return dx, None, None, None, *gradients


class _GatedMLP(torch.autograd.Function):
    """Parts: projections of gate and up, the gated activation, the projection down."""

    @staticmethod
    def forward(ctx, x, activation, *operands):
        of_gate, of_up, of_down = _in_fours(operands)
        parts = [Part(), Part(), Part(), Part()]
        gate = _project(parts[0], x, *of_gate)
        up = _project(parts[1], x, *of_up)
        require_gated(gate, up, activation)
        inner = GLUFunction.forward(parts[2], gate, up, activation)
        y = _project(parts[3], inner, *of_down)
        keep(ctx, parts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        needs_x, _, *needs = ctx.needs_input_grad
        of_gate, of_up, of_down = _in_fours(needs)
        parts = in_reverse(ctx)
        dinner, down = _project_backward(next(parts), grad_outputs[0], True, of_down)
        dgate, dup, _ = GLUFunction.backward(next(parts), dinner)
        del dinner
        dx, up = _project_backward(next(parts), dup, needs_x, of_up)
        del dup
        dx, gate = _project_backward(next(parts), dgate, needs_x, of_gate, dx)
        return dx, None, *gate, *up, *down


def _in_fours(operands: Sequence[Any]) -> list[Sequence[Any]]:
    """The operands of every projection and norm, or what is said of each."""
    return [operands[i : i + 4] for i in range(0, len(operands), 4)]


def _project(part: Part, x: Tensor, weight: Tensor, bias: Tensor | None, *buffers: Any) -> Tensor:
    require_fitting("linear", x, weight, bias)
    return LinearFunction.forward(part, x, weight, bias, *buffers)


def _project_backward(
    part: Part, dy: Tensor, needs_x: bool, needs: Sequence[bool], added_to: Tensor | None = None
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """(dx, in place on top of `added_to`; gradients of the projection's four operands)."""
    part.needs_input_grad = (needs_x, *needs)
    dx, *gradients = LinearFunction.backward(part, dy)
    return dx if added_to is None else added_to.add_(dx), tuple(gradients)


def _norm(part: Part, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    require_norm("rms_norm", weight, x=x)
    if x.is_cuda:
        y = RMSNormCUDAFunction.forward(part, x, None, weight, *options)
        assert isinstance(y, Tensor)
        return y
    return RMSNormFunction.forward(part, x, weight, *options)


def _norm_backward(
    part: Part, dy: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(dx; gradients of the norm's four operands)."""
    if dy.is_cuda:
        part.needs_input_grad = (True, False, needs[0])
        dx, _, *gradients = RMSNormCUDAFunction.backward(part, dy)
    else:
        part.needs_input_grad = (True, needs[0])
        dx, *gradients = RMSNormFunction.backward(part, dy)
    return dx, tuple(gradients)
