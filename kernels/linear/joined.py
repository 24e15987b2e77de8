"""What a decoder layer computes around its attention, as one autograd function before it and one
after: projections with their head norms and rotation, and the gated MLP.

Shapes: `attention_inputs`: x [..., K] of T rows -> q [T, H, D], k and v [T, Hkv, D]. `gated_mlp`:
    x [..., K] -> [..., N].
Dtypes and rounding points: those of `linear`, `rms_norm`, `rotary` and `glu`.
Order: those of the four ops.
Invariant to: as the ops; the bytes are theirs, one after another, forward and backward.
Varies with: as the ops.
Backward: that of each op, the last one first. Autograd is given operands in that order, and x once
    per projection, so that it adds the parts of dx as it does those of the ops: one by one, each
    sum rounded, on top of what other uses of x have sent; those of a shared parameter alike. An
    output that nobody used gets no gradient, nor do the parameters that it alone depends on. One
    function is asked for all its gradients: `backward(inputs=...)` folds every parameter of a
    function on the way to the inputs.
Errors: those of the ops. Not for a compiler to trace: it is to see the ops.
Cost: that of the ops, less the host's time for a call of a module and of autograd for each. A
    backward pass holds the gradients that it was given, and its parts of dx, until its end: at the
    end of `attention_inputs` (H + 2 Hkv) D + 2 K numbers per token more than the ops would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_consistency.kernels.core.recording import Part, apply, in_reverse, keep, once_differentiable
from rl_consistency.kernels.glu.op import GLUFunction, require_gated
from rl_consistency.kernels.gradient_fold.op import GradientBuffer
from rl_consistency.kernels.linear.op import LinearFunction, require_fitting
from rl_consistency.kernels.rms_norm.op import RMSNormFunction, require_norm
from rl_consistency.kernels.rotary.op import RotaryFunction, require_rotary


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
    operands = [operand for part in reversed((*projections, *norms)) for operand in part]
    return apply(_AttentionInputs, x, x, x, cos, sin, head_dim, *operands)


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
    return apply(_GatedMLP, x, x, activation, *down, *up, *gate)


class _AttentionInputs(torch.autograd.Function):
    """Parts: projections of q, k and v; norms of q and k, if any; the rotation."""

    @staticmethod
    def forward(ctx, x, _x_of_k, _x_of_q, cos, sin, head_dim, *operands):
        ctx.set_materialize_grads(False)
        *norms, of_v, of_k, of_q = _in_fours(operands)
        parts = [Part() for _ in range(4 + len(norms))]
        q, k, v = (
            _in_heads(_project(part, x, *of), head_dim)
            for part, of in zip(parts[:3], (of_q, of_k, of_v), strict=True)
        )
        if norms:
            of_k_norm, of_q_norm = norms
            q, k = _norm(parts[3], q, *of_q_norm), _norm(parts[4], k, *of_k_norm)
        require_rotary(q, k, cos, sin)
        q, k = RotaryFunction.forward(parts[-1], q, k, cos, sin)
        ctx.shapes = (q.shape, k.shape)
        keep(ctx, parts)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        dq, dk, dv = grad_outputs
        needs_x, _, _, _, _, _, *needs = ctx.needs_input_grad
        *norms, of_v, of_k, of_q = _in_fours(needs)
        parts = in_reverse(ctx)
        dys = [*_rotated_back(next(parts), dq, dk, ctx.shapes), dv]
        gradients: list[Tensor | None] = []
        for i, of in zip((1, 0), norms, strict=False):
            dys[i], found = _norm_backward(next(parts), dys[i], of)
            gradients += found
        dxs: list[Tensor | None] = []
        for of in (of_v, of_k, of_q):
            dx, found = _project_backward(next(parts), dys.pop(), needs_x, of)
            dxs.append(dx)
            gradients += found
        return *dxs, None, None, None, *gradients


class _GatedMLP(torch.autograd.Function):
    """Parts: projections of gate and up, the gated activation, the projection down."""

    @staticmethod
    def forward(ctx, x, _x_of_gate, activation, *operands):
        ctx.set_materialize_grads(False)
        of_down, of_up, of_gate = _in_fours(operands)
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
        if grad_outputs[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_x, _, _, *needs = ctx.needs_input_grad
        of_down, of_up, of_gate = _in_fours(needs)
        parts = in_reverse(ctx)
        dinner, down = _project_backward(next(parts), grad_outputs[0], True, of_down)
        dgate, dup, _ = GLUFunction.backward(next(parts), dinner)
        del dinner
        dx_of_up, up = _project_backward(next(parts), dup, needs_x, of_up)
        del dup
        dx_of_gate, gate = _project_backward(next(parts), dgate, needs_x, of_gate)
        return dx_of_up, dx_of_gate, None, *down, *up, *gate


def _in_fours(operands: Sequence[Any]) -> list[Sequence[Any]]:
    """The operands of every projection and norm, or what is said of each."""
    return [operands[i : i + 4] for i in range(0, len(operands), 4)]


def _project(part: Part, x: Tensor, weight: Tensor, bias: Tensor | None, *buffers: Any) -> Tensor:
    require_fitting("linear", x, weight, bias)
    return LinearFunction.forward(part, x, weight, bias, *buffers)


def _in_heads(y: Tensor, head_dim: int) -> Tensor:
    return y.view(y.shape[:-1].numel(), y.shape[-1] // head_dim, head_dim)


def _project_backward(
    part: Part, dy: Tensor | None, needs_x: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """(dx; gradients of the projection's four operands). dy may be split into heads."""
    if dy is None:
        return None, (None,) * len(needs)
    part.needs_input_grad = (needs_x, *needs)
    width = part.saved_tensors[1].shape[0]
    dx, *gradients = LinearFunction.backward(part, dy.reshape(-1, width))
    return dx, tuple(gradients)


def _rotated_back(
    part: Part, dq: Tensor | None, dk: Tensor | None, shapes: tuple[torch.Size, torch.Size]
) -> tuple[Tensor | None, Tensor | None]:
    """dq and dk before the rotation; one that is missing beside the other counts as zeros."""
    given = dk if dq is None else dq
    if given is None:
        return None, None
    dq, dk = (
        given.new_zeros(shape) if dy is None else dy
        for dy, shape in zip((dq, dk), shapes, strict=True)
    )
    dq, dk, *_ = RotaryFunction.backward(part, dq, dk)
    return dq, dk


def _norm(part: Part, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    require_norm("rms_norm", weight, x=x)
    y = RMSNormFunction.forward(part, x, None, weight, *options)
    assert isinstance(y, Tensor)
    return y


def _norm_backward(
    part: Part, dy: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """(dx; gradients of the norm's four operands)."""
    if dy is None:
        return None, (None,) * len(needs)
    part.needs_input_grad = (True, False, needs[0])
    dx, _, *gradients = RMSNormFunction.backward(part, dy)
    return dx, tuple(gradients)
