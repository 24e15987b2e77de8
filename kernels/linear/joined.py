"""Two autograd functions for a decoder layer: one computes attention's q, k and v (projections,
head norms, rotation), the other the gated MLP.

Shapes: `attention_inputs`: x [..., K] of T rows -> q [T, H, D], k and v [T, Hkv, D]. `gated_mlp`:
    x [..., K] -> [..., N].
Dtypes and rounding points: those of `linear`, `rms_norm`, `rotary` and `glu`.
Order: those of the four ops. The bytes are those of the ops called one after another, forward and
    backward.
Invariant to, varies with: as the ops.
Backward: that of each op, the last op first. An output without a gradient gives none to x or to
    the parameters that only it depends on. `backward(inputs=...)` folds every parameter of a
    function on the way to the inputs, since a function computes all its gradients at once.
Errors: those of the ops. A compiler must trace the ops, not these functions.
Cost: that of the ops, less the host's time for each module call and autograd node. A backward pass
    keeps its incoming gradients and its parts of dx until it ends: `attention_inputs` holds
    (H + 2 Hkv) D + 2 K numbers per token more than the ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import Unrecorded, apply, once_differentiable
from rl_consistency.kernels.glu.op import GLUFunction, require_gated
from rl_consistency.kernels.gradient_fold.op import GradientBuffer
from rl_consistency.kernels.linear.op import LinearFunction, require_fitting
from rl_consistency.kernels.rms_norm.op import RMSNormFunction, require_norm
from rl_consistency.kernels.rotary.op import RotaryFunction, require_rotary


class Projection(NamedTuple):
    """The arguments of `linear` other than x."""

    weight: Tensor
    """[N, K]."""
    bias: Tensor | None
    """[N]."""
    weight_grad: GradientBuffer | None
    bias_grad: GradientBuffer | None


class HeadNorm(NamedTuple):
    """The arguments of `rms_norm` other than x."""

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
    """Queries, keys and values of T rows x [..., K]; queries and keys normed and rotated.

    Args:
        x: [..., K].
        projections: of queries, keys and values, each to heads * head_dim columns.
        norms: of the heads of queries and of keys; empty for none.
        cos: [T, D/2] fp32.
        sin: [T, D/2] fp32.
        head_dim: D.

    Returns:
        q [T, H, D], k [T, Hkv, D], v [T, Hkv, D].
    """
    q, k, v = projections
    q_norm, k_norm = norms or (_NO_NORM, _NO_NORM)
    operands = _AttentionOperands(
        x_of_v=x, x_of_k=x, x_of_q=x, cos=cos, sin=sin, head_dim=head_dim,
        k_norm=k_norm, q_norm=q_norm, v=v, k=k, q=q,
    )  # fmt: skip
    return apply(_AttentionInputs, *_flat(operands))


def gated_mlp(
    x: Tensor, gate: Projection, up: Projection, down: Projection, activation: str = "silu"
) -> Tensor:
    """down(glu(gate(x), up(x))): x [..., K] -> [..., N].

    gate and up map K columns to F, down maps F to N; `activation` is one of `glu.ACTIVATIONS`.
    """
    operands = _MLPOperands(
        x_of_up=x, x_of_gate=x, activation=activation, down=down, up=up, gate=gate
    )
    return apply(_GatedMLP, *_flat(operands))


# The order of the fields below is part of the bits. Autograd takes a flat list of operands. If a
# tensor stands in it several times, autograd adds its gradients one by one, in the order of the
# list, to those of the tensor's other uses. Separate ops send theirs with the last op first. So the
# fields begin with the last op: first x once per projection, then the parameters (maybe shared).


class _AttentionOperands(NamedTuple):
    """Per operand of `_AttentionInputs`: itself, whether it needs a gradient, or its gradient."""

    x_of_v: Any
    x_of_k: Any
    x_of_q: Any
    cos: Any
    sin: Any
    head_dim: Any
    k_norm: HeadNorm
    q_norm: HeadNorm
    v: Projection
    k: Projection
    q: Projection


class _MLPOperands(NamedTuple):
    """The same for `_GatedMLP`."""

    x_of_up: Any
    x_of_gate: Any
    activation: Any
    down: Projection
    up: Projection
    gate: Projection


_NO_NORM = HeadNorm._make([None] * 4)
_NO_PROJECTION = Projection._make([None] * 4)
"""Stand for a norm or projection that is absent or gets no gradients."""

_Operands = TypeVar("_Operands", _AttentionOperands, _MLPOperands)


def _flat(operands: tuple[Any, ...]) -> list[Any]:
    """The operands in one list, with the fields of a norm or projection in its place."""
    flat = []
    for operand in operands:
        if isinstance(operand, (Projection, HeadNorm)):
            flat += operand
        else:
            flat.append(operand)
    return flat


def _named(kind: type[_Operands], flat: Sequence[Any]) -> _Operands:
    """The inverse of `_flat`."""
    left = iter(flat)
    return kind._make(
        field._make(islice(left, len(field._fields)))
        if field in (Projection, HeadNorm)
        else next(left)
        for field in _field_types(kind)
    )


@cache
def _field_types(kind: type[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(get_type_hints(kind).values())


class _Part(Unrecorded):
    """Autograd's context for one op inside a function of several ops.

    It holds no tensor between the passes: `_keep` gives them to autograd and `_in_reverse` gets
    them back.
    """

    needs_input_grad: tuple[bool, ...] = ()
    """Set before the op's backward pass."""
    saved_tensors: tuple[Any, ...] = ()
    count = 0
    """Number of tensors that the op saved."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Hold the tensors until `_keep`."""
        self.saved_tensors = tensors


def _keep(ctx: Any, parts: list[_Part]) -> None:
    """End a forward pass: give the tensors of all parts to autograd."""
    ctx.save_for_backward(*[tensor for part in parts for tensor in part.saved_tensors])
    for part in parts:
        part.count, part.saved_tensors = len(part.saved_tensors), ()
    ctx.parts = parts


def _in_reverse(ctx: Any) -> Iterator[_Part]:
    """The parts in a backward pass, last one first.

    A part holds its tensors until the next part is asked for. Tensors that a hook makes on
    unpacking (`save_on_cpu`, a checkpoint) live longer: autograd unpacks those of all parts at the
    start, once per part. It also checks all tensors for changes in place, even those of a part that
    gets no gradient.
    """
    saved = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    for part in reversed(ctx.parts):
        first = len(saved) - part.count
        part.saved_tensors = tuple(saved[first:])
        del saved[first:]
        try:
            yield part
        finally:
            part.saved_tensors = ()


class _AttentionInputs(torch.autograd.Function):
    """Parts: projections of q, k and v; norms of q and k, if any; the rotation."""

    @staticmethod
    def forward(ctx, *flat):
        ctx.set_materialize_grads(False)
        of = _named(_AttentionOperands, flat)
        x, head_dim, normed = of.x_of_q, of.head_dim, of.q_norm.weight is not None
        parts = [_Part() for _ in range(6 if normed else 4)]
        q = _in_heads(_project(parts[0], x, of.q), head_dim)
        k = _in_heads(_project(parts[1], x, of.k), head_dim)
        v = _in_heads(_project(parts[2], x, of.v), head_dim)
        if normed:
            q, k = _norm(parts[3], q, of.q_norm), _norm(parts[4], k, of.k_norm)
        require_rotary(q, k, of.cos, of.sin)
        q, k = RotaryFunction.forward(parts[-1], q, k, of.cos, of.sin)
        ctx.normed, ctx.shapes = normed, (q.shape, k.shape)
        _keep(ctx, parts)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        dq, dk, dv = grad_outputs
        needs = _named(_AttentionOperands, ctx.needs_input_grad)
        parts = _in_reverse(ctx)
        dq, dk = _rotated_back(next(parts), dq, dk, ctx.shapes)
        k_norm = q_norm = _NO_NORM
        if ctx.normed:
            dk, k_norm = _norm_backward(next(parts), dk, needs.k_norm)
            dq, q_norm = _norm_backward(next(parts), dq, needs.q_norm)
        dx_of_v, v = _project_backward(next(parts), dv, needs.x_of_v, needs.v)
        dx_of_k, k = _project_backward(next(parts), dk, needs.x_of_k, needs.k)
        del dk
        dx_of_q, q = _project_backward(next(parts), dq, needs.x_of_q, needs.q)
        gradients = _AttentionOperands(
            x_of_v=dx_of_v, x_of_k=dx_of_k, x_of_q=dx_of_q, cos=None, sin=None, head_dim=None,
            k_norm=k_norm, q_norm=q_norm, v=v, k=k, q=q,
        )  # fmt: skip
        return tuple(_flat(gradients))


class _GatedMLP(torch.autograd.Function):
    """Parts: projections of gate and up, the gated activation, the projection down."""

    @staticmethod
    def forward(ctx, *flat):
        ctx.set_materialize_grads(False)
        of = _named(_MLPOperands, flat)
        parts = [_Part() for _ in range(4)]
        gate = _project(parts[0], of.x_of_gate, of.gate)
        up = _project(parts[1], of.x_of_up, of.up)
        require_gated(gate, up, of.activation)
        inner = GLUFunction.forward(parts[2], gate, up, of.activation)
        y = _project(parts[3], inner, of.down)
        _keep(ctx, parts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        if grad_outputs[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = _named(_MLPOperands, ctx.needs_input_grad)
        parts = _in_reverse(ctx)
        dinner, down = _project_backward(next(parts), grad_outputs[0], True, needs.down)
        dgate, dup, _ = GLUFunction.backward(next(parts), dinner)
        del dinner
        dx_of_up, up = _project_backward(next(parts), dup, needs.x_of_up, needs.up)
        del dup
        dx_of_gate, gate = _project_backward(next(parts), dgate, needs.x_of_gate, needs.gate)
        gradients = _MLPOperands(
            x_of_up=dx_of_up, x_of_gate=dx_of_gate, activation=None, down=down, up=up, gate=gate
        )
        return tuple(_flat(gradients))


def _project(part: _Part, x: Tensor, of: Projection) -> Tensor:
    require_fitting("linear", x, of.weight, of.bias)
    return LinearFunction.forward(part, x, of.weight, of.bias, of.weight_grad, of.bias_grad)


def _in_heads(y: Tensor, head_dim: int) -> Tensor:
    return y.view(y.shape[:-1].numel(), y.shape[-1] // head_dim, head_dim)


def _project_backward(
    part: _Part, dy: Tensor | None, needs_x: bool, needs: Any
) -> tuple[Tensor | None, Projection]:
    """dx and the gradients of those operands that `needs` marks; dy may be split into heads."""
    if dy is None:
        return None, _NO_PROJECTION
    part.needs_input_grad = (needs_x, *needs)
    width = part.saved_tensors[1].shape[0]
    dx, dweight, dbias, _, _ = LinearFunction.backward(part, dy.reshape(-1, width))
    return dx, _NO_PROJECTION._replace(weight=dweight, bias=dbias)


def _rotated_back(
    part: _Part, dq: Tensor | None, dk: Tensor | None, shapes: tuple[torch.Size, torch.Size]
) -> tuple[Tensor | None, Tensor | None]:
    """dq and dk before the rotation; if one is None, it counts as zeros."""
    given = dk if dq is None else dq
    if given is None:
        return None, None
    dq, dk = (
        given.new_zeros(shape) if dy is None else dy
        for dy, shape in zip((dq, dk), shapes, strict=True)
    )
    dq, dk, _, _ = RotaryFunction.backward(part, dq, dk)
    return dq, dk


def _norm(part: _Part, x: Tensor, of: HeadNorm) -> Tensor:
    require_norm("rms_norm", of.weight, x=x)
    options = (of.weight, of.eps, of.rows_per_token, of.weight_grad)
    y = RMSNormFunction.forward(part, x, None, *options)
    assert isinstance(y, Tensor)
    return y


def _norm_backward(part: _Part, dy: Tensor | None, needs: Any) -> tuple[Tensor | None, HeadNorm]:
    """dx and the gradients of those operands that `needs` marks."""
    if dy is None:
        return None, _NO_NORM
    part.needs_input_grad = (True, False, needs.weight)
    dx, _, dweight, *_ = RMSNormFunction.backward(part, dy)
    return dx, _NO_NORM._replace(weight=dweight)
