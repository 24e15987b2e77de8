"""y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension; also of x + residual.

Shapes: x [..., H], weight [H] -> [..., H]. Used for hidden states and for heads (qk-norm).
Dtypes and rounding points: fp32, bf16, fp16 in and out; fp32 inside, one rounding at the end (stock
    rounds twice in bf16). x + residual is rounded to the dtype before the norm; so are the sum's
    two gradients before they are added.
Order: ORDER below, `rms_norm`.
Invariant to: the number of rows, their positions and neighbours.
Varies with: H.
Backward: dx row by row; dweight by `gradient_fold` over steps of 16 tokens with all their heads.
Errors: TypeError on dtypes, ValueError on shapes, devices and autocast.
Cost: memory-bound. On a GPU one launch forward, two backward, and every operand is read once.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_step_sums, step_sums
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd_op, rms_norm_fwd_op

_FORMULA = (
    "in fp32; round = to the dtype\n"
    "forward:  r = 1 / sqrt(tree(x*x) / H + eps);  y = round((x*r) * weight)\n"
    "backward: c = tree((dy*weight) * (x*r)) / H;  dx = round(r * ((dy*weight) - (x*r)*c))\n"
    "dweight:  gradient_fold of columns over dy * (x*r), a step = 16 tokens with all their heads\n"
)

ORDER = ReductionOrder(
    id="rms_norm",
    version=2,
    cpu=_FORMULA + "tree = row_reduction over H",
    cuda=_FORMULA + "tree: in every 8 neighbours x[i] += x[i+4], x[i] += x[i+2], x[i] += x[i+1];\n"
    "      then the halving tree over the H/8 groups, zeros up to a power of two\n"
    "sum of a step: 0 + pair 0 + ... + pair 7, a pair of tokens by the halving tree over its rows",
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rows_per_token: int = 1,
    weight_grad: GradientBuffer | None = None,
) -> Tensor:
    """Root-mean-square normalisation of the last dimension -> the shape and dtype of x.

    Args:
        x: [..., H].
        weight: [H].
        eps: added to the mean square.
        rows_per_token: rows of one token in x (qk-norm: the number of heads); a step of the fold
            takes whole tokens.
        weight_grad: buffer that dweight is folded into.
    """
    require_norm("rms_norm", weight, x=x)
    return apply(RMSNormFunction, x, None, weight, eps, rows_per_token, weight_grad)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_grad: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), with the bytes of the two separate ops.

    residual has the shape and dtype of x; the other arguments are those of `rms_norm`.
    """
    require_norm("add_rms_norm", weight, x=x, residual=residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)} and x {tuple(x.shape)} must be equal."
        )
    if x.is_cuda:
        return apply(RMSNormFunction, x, residual, weight, eps, 1, weight_grad)
    total = residual + x
    return rms_norm(total, weight, eps, weight_grad=weight_grad), total


def require_norm(op: str, weight: Tensor, **operands: Tensor) -> None:
    """Check the operands of `rms_norm`; raises what the module's Errors line says."""
    require_operands(op, **operands, weight=weight)
    if weight.shape != operands["x"].shape[-1:]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} does not fit x {tuple(operands['x'].shape)}; "
            "weight is [hidden_size] and x ends in hidden_size."
        )


class RMSNormFunction(torch.autograd.Function):
    """y; with a residual (only on CUDA) y and total = x + residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, rows_per_token, weight_grad):
        ctx.set_materialize_grads(False)
        if x.is_cuda:
            y, total, rstd = rms_norm_fwd_op(x, residual, weight, eps)
        else:
            assert residual is None
            total, wide = x, x.float()
            # All code paths round division and square root alike, but not rsqrt.
            rstd = 1.0 / torch.sqrt(tree_sum(wide * wide) / x.shape[-1] + eps).unsqueeze(-1)
            y = ((wide * rstd) * weight.float()).to(x.dtype)
        ctx.save_for_backward(x if residual is None else total, weight, rstd)
        ctx.rows_per_token, ctx.weight_grad = rows_per_token, weight_grad
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        dy, dtotal = grad_outputs if len(grad_outputs) == 2 else (grad_outputs[0], None)
        if dy is None:
            return dtotal, dtotal, None, None, None, None
        saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
        dx, sums = (_backward_cuda if dy.is_cuda else _backward_cpu)(ctx, saved, dy, dtotal)
        weight = saved[1]
        dweight = None
        if ctx.needs_input_grad[2] and dy.is_cuda and ctx.weight_grad is None:
            dweight = folded_step_sums(sums, weight.dtype)
        elif ctx.needs_input_grad[2]:
            fold = lambda g, fresh: fold_step_sums(g, sums, fresh=fresh)  # noqa: E731
            dweight = fold_parameter(ctx, weight, ctx.weight_grad, fold, overwrites=True)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None, None


def _backward_cuda(ctx, saved, dy: Tensor, dtotal: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx, and the step sums of dweight where autograd wants it."""
    x, weight, rstd = saved
    with_sums = ctx.needs_input_grad[2]
    return rms_norm_bwd_op(dy, dtotal, x, weight, rstd, ctx.rows_per_token, with_sums)


def _backward_cpu(ctx, saved, dy: Tensor, dtotal: None) -> tuple[Tensor | None, Tensor]:
    """As `_backward_cuda`; dx only where autograd wants it."""
    x, weight, rstd = saved
    dy, normalized = dy.float(), x.float() * rstd
    dx, sums = None, dy.new_empty(0)
    if ctx.needs_input_grad[0]:
        weighted = dy * weight.float()
        mean = (tree_sum(weighted * normalized) / x.shape[-1]).unsqueeze(-1)
        dx = (rstd * (weighted - normalized * mean)).to(x.dtype)
    if ctx.needs_input_grad[2]:
        rows = (dy * normalized).reshape(-1, x.shape[-1])
        sums = step_sums(rows, ctx.rows_per_token)
    return dx, sums


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula of `rms_norm` in fp64, for accuracy tests only."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
