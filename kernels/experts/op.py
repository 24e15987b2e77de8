"""y[r] = sum over the experts e of row r of weight[r, e] * down_e(glu(gate_up_e(x[r]))).

Shapes: x [R, H], expert_ids [R, k] int32, weights [R, k] fp32, gate_up [E, 2I, H] (gate first),
    down [E, H, I], a layout of R rows -> [R, H].
Dtypes and rounding points: x, gate_up, down fp32, bf16, fp16. Each expert's row has those of
    `linear`, `glu`, `linear`. The k rows are weighted and added in fp32, with one rounding.
Order: ORDER below, `experts`.
Invariant to: the number of rows, their positions, neighbours and their experts; which rows of a
    call are filler.
Varies with: H, I; on a CPU also 2I.
Backward: no row's gradient depends on others. The gradients of gate_up and down are folds over
    runs: the rows of one sequence at one expert, by position. Sequences follow one another in the
    order of the layout. No cut between sequences moves a bit.
Errors: TypeError on dtypes; ValueError on shapes, devices, autocast, activations, a layout of more
    rows, sequences that share rows (on CUDA in backward only), and on a CPU on ids outside the
    experts or not ascending; on CUDA such a row gives NaN.
Cost: the products of the rows routed; in dW each run is filled up to a multiple of 16 rows.

A row that no sequence of the layout owns reaches no expert and gives zeros, as does its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout
from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.experts import cpu, cuda
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu_reference

ORDER = ReductionOrder(
    id="experts",
    version=1,
    cpu="""\
for each row r that a sequence owns, for each of its experts e, ids upward:
    a = linear(x[r], gate_up[e]);  h = glu(a[:I], a[I:]);  b[e] = linear(h, down[e])
y[r] = sum over e, ids upward, of fp32(weight[r, e] * b[e]), in fp32 from the first; one rounding
backward of (r, e):
    u = dy[r] @ down[e], matmul order over H, rounded to the dtype
    dweight[r, e] = halving tree over I of fp32(u * h)
    da = glu's gradient of fp32(weight[r, e] * u), fp32 inside, one rounding
    c[e] = da @ gate_up[e], matmul order over 2I, rounded to the dtype
dx[r] = sum over e, ids upward, of c[e], in fp32 from the first; one rounding
for each expert, for each sequence, in the order of the layout, for each 16 of the sequence's rows
    that have the expert, by position, with zeros after a short last step:
    dgate_up[e] = a gradient_fold step of da^T x
    ddown[e] = a gradient_fold step of dy^T round(weight[r, e] * h)
at the end of a call on an expert with rows: dgate_up[e] += 0, ddown[e] += 0
""",
)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    layout: AttentionLayout,
    *,
    activation: str,
    gate_up_grad: GradientBuffer | None = None,
    down_grad: GradientBuffer | None = None,
) -> Tensor:
    """The weighted sum of each row's experts.

    Args:
        x: [R, H].
        expert_ids: [R, k] int32, ascending in each row, as `route_with_logits` gives them.
        weights: [R, k] fp32, differentiable.
        gate_up: [E, 2I, H]; the first I rows of an expert are its gate.
        down: [E, H, I].
        layout: the sequences of the rows, those of the call's attention.
        activation: one of `glu.ACTIVATIONS`.
        gate_up_grad: buffer that the gradient of gate_up is folded into; without it autograd
            receives the gradient, folded from zero.
        down_grad: the same for down.

    Returns:
        [R, H] in the dtype of x.
    """
    _require_fitting(x, expert_ids, weights, gate_up, down, layout, activation)
    recorded = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x, weights, gate_up, down)
    )
    return apply(
        ExpertsFunction,
        *(x, expert_ids, weights, gate_up, down, layout, activation, recorded),
        (gate_up_grad, down_grad),
    )


def _require_fitting(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    layout: AttentionLayout,
    activation: str,
) -> None:
    require_operands("experts", x=x, gate_up=gate_up, down=down)
    shapes = f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}"
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"experts: {shapes}; they are [rows, hidden], [experts, 2 * intermediate, hidden] and "
            "[experts, hidden, intermediate]."
        )
    count, hidden, width = down.shape
    if x.shape[1] != hidden or gate_up.shape != (count, 2 * width, hidden):
        raise ValueError(
            f"experts: {shapes} do not fit each other; gate_up is [experts, 2 * intermediate, "
            "hidden] and down [experts, hidden, intermediate]."
        )
    if expert_ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TypeError(
            f"experts: ids are {expert_ids.dtype} and weights {weights.dtype}; they must be int32 "
            "and float32, as `route_with_logits` gives them."
        )
    routed = x.shape[0], expert_ids.shape[-1] if expert_ids.dim() else 0
    fits = expert_ids.shape == weights.shape == routed and 1 <= routed[1] <= count
    if not fits:
        raise ValueError(
            f"experts: ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} for "
            f"{x.shape[0]} rows and {count} experts; both are [rows, k], k at most the experts."
        )
    if not expert_ids.device == weights.device == x.device:
        raise ValueError(
            f"experts: ids are on {expert_ids.device} and weights on {weights.device} but x is on "
            f"{x.device}; move them to one device."
        )
    if layout.num_rows > x.shape[0]:
        raise ValueError(
            f"experts: the layout has sequences up to row {layout.num_rows}, x has {x.shape[0]}."
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts: activation {activation!r}; allowed: {', '.join(ACTIVATIONS)}.")


class ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, expert_ids, weights, gate_up, down, layout, activation, recorded, buffers):
        own: Any = cuda if x.is_cuda else cpu
        y, packed, ctx.routed = own.experts_fwd(
            x, expert_ids, weights, gate_up, down, layout, activation, recorded
        )
        ctx.save_for_backward(x, weights, gate_up, down, packed)
        ctx.activation, ctx.buffers = activation, buffers
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        x, weights, gate_up, down, packed = ctx.saved_tensors
        (dy,), routed = grad_outputs, ctx.routed
        own: Any = cuda if x.is_cuda else cpu
        dx, dweights, dpacked, weighted = own.experts_bwd(
            dy, routed, weights, gate_up, down, packed, ctx.activation
        )

        def gradient(i, weight, dy, x):
            """Of gate_up (0) or down (1), for which dy has a row for each row of the call."""
            if not ctx.needs_input_grad[3 + i]:
                return None

            def fold(g, fresh):
                own.fold(g, dy, x, routed, dy_by_row=i == 1, fresh=fresh)

            return fold_parameter(ctx, weight, ctx.buffers[i], fold, overwrites=True)

        found = gradient(0, gate_up, dpacked, x), gradient(1, down, dy, weighted)
        return dx, None, dweights, *found, *(None,) * 4


def experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """`experts` in fp64 where every row has a sequence, for accuracy tests only."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(gate_up.shape[0]):
        weight = (weights.double() * (expert_ids == expert)).sum(-1, keepdim=True)
        gate, up = (x.double() @ gate_up[expert].double().t()).chunk(2, dim=-1)
        total = total + weight * (glu_reference(gate, up, activation) @ down[expert].double().t())
    return total
