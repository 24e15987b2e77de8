"""Each row's k experts and their weights: softmax(x @ weight^T), its k largest values.

Shapes: x [R, H], weight [E, H] -> expert_ids [R, k] int32, upward in each row; weights [R, k] fp32;
    logits [R, E] fp32.
Dtypes and rounding points: x and weight fp32, bf16, fp16. Logits, softmax and weights stay fp32 and
    are never rounded to the dtype. Logit gradients, then dx, are rounded to it once.
Order: ORDER below, `router`.
Invariant to: the number of rows, their positions and neighbours.
Varies with: H, E, k; the device.
Backward: through the weights and the logits, the choice being constant; dx in the `matmul` order
    over E, dweight by `gradient_fold` over the rows in order.
Errors: TypeError on dtypes; ValueError on shapes, devices, autocast and k outside 1 to E. A row
    with a logit that is not finite gets weights of NaN; other rows do not notice.
Cost: a product with E columns and a pass over its result, k searches of a row in registers.

Equal logits go to the lower id. Softmax keeps the order of the logits, so comparing them chooses
the largest probabilities, also where distinct logits give equal ones.

Source: Shazeer et al., Outrageously Large Neural Networks (2017), without noise.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.kernels.reduction.tree_fold_triton import exp_fp32, tree_fold

_LINES = """\
z = matmul order over H, fp32, not rounded
p = exp(z - max z);  tree: halving tree over {tree}
chosen: the k largest z, equal ones by lower id (-0 equals +0); in ascending id
weights: p = p / tree(p); where normalized p[chosen] / tree(p where chosen, else 0)
weights of a row with a z that is not finite: NaN
q = p, where normalized the weights, 0 elsewhere;  d = dweights, 0 elsewhere
dz = q * (d - tree(q * d)), + the given dlogits, if any, in fp32; rounded to the dtype
dx = matmul order over E, rounded once;  dweight = gradient_fold over rows
"""
ORDER = ReductionOrder(
    id="router",
    version=1,
    cpu=_LINES.format(tree="all E"),
    cuda=_LINES.format(
        tree="E rounded up to a power of two, with zeros\n"
        "exp: exp2 of the argument less its integer part in units of log 2, as in sampling"
    ),
)


@dataclass(frozen=True)
class RouterSchedule:
    """How programs share the rows; it changes no bit."""

    rows: int
    """Rows of a program; a power of two."""
    warps: int


ALL = (
    RouterSchedule(1, 1),
    RouterSchedule(4, 2),
    RouterSchedule(4, 4),
    RouterSchedule(16, 4),
    RouterSchedule(32, 8),
    RouterSchedule(1, 4),
)

MOST_HELD = 32
"""Logits of a thread. With twice as many the compiler took minutes."""

FEW = 512
"""Rows up to which a program holds one: many programs are then faster than wide ones."""


def candidates(block: int) -> tuple[RouterSchedule, ...]:
    """Schedules to time and to compare, for `block` experts, a power of two."""
    return tuple(s for s in ALL if s.rows * block <= MOST_HELD * 32 * s.warps)


def pick(rows: int, block: int) -> RouterSchedule:
    """The schedule for `rows` rows of `block` experts, a power of two."""
    if block > 1024:
        return ALL[5]
    if rows <= FEW:
        return ALL[0]
    return ALL[3] if block <= 128 else ALL[2]


@triton.jit
def _tree(x, known, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """The sum of each row of x [ROWS, BLOCK_E] over the known experts, [ROWS, 1]."""
    return tree_fold(tl.where(known, x, 0.0), ROWS, BLOCK_E)[:, None]


@remembered
@triton.jit(do_not_specialize=["R"])
def choose_kernel(
    logits_ptr, ids_ptr, weights_ptr, p_ptr, R, E,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows; probabilities are stored unless weights are normalized."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = (row < R)[:, None] & (expert < E)  # [ROWS, BLOCK_E]
    at = row.to(tl.int64)[:, None] * E + expert
    z = tl.load(logits_ptr + at, mask=inside, other=float("-inf"))
    known = tl.broadcast_to(expert < E, (ROWS, BLOCK_E))
    infinite = known & ~(tl.abs(z) < float("inf"))  # or NaN
    failed = tl.max(infinite.to(tl.int32), axis=1)[:, None] > 0
    key = tl.where(z == z, z, float("-inf"))
    left = known.to(tl.int32)
    for _ in range(TOP_K):
        most = tl.max(tl.where(left > 0, key, float("-inf")), axis=1)[:, None]
        best = tl.min(tl.where((left > 0) & (key >= most), expert, BLOCK_E), axis=1)[:, None]
        left = tl.where(expert == best, 0, left)
    chosen = known & (left == 0)
    p = exp_fp32(z - tl.max(z, axis=1)[:, None])
    p = tl.div_rn(p, tl.broadcast_to(_tree(p, known, ROWS, BLOCK_E), (ROWS, BLOCK_E)))
    weights = p
    if NORMALIZE:
        total = _tree(p, chosen, ROWS, BLOCK_E)
        weights = tl.div_rn(p, tl.broadcast_to(total, (ROWS, BLOCK_E)))
    else:
        tl.store(p_ptr + at, p, mask=inside)
    weights = tl.where(failed, float("nan"), weights)
    slot = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    to = row.to(tl.int64)[:, None] * TOP_K + slot
    tl.store(ids_ptr + to, tl.broadcast_to(expert, (ROWS, BLOCK_E)), mask=inside & chosen)
    tl.store(weights_ptr + to, weights, mask=inside & chosen)


@remembered
@triton.jit(do_not_specialize=["R"])
def logit_gradients_kernel(
    dweights_ptr, ids_ptr, weights_ptr, p_ptr, dlogits_ptr, R, E,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = (row < R)[:, None] & (expert < E)
    at = row.to(tl.int64)[:, None] * E + expert
    d = tl.zeros((ROWS, BLOCK_E), tl.float32)
    q = d
    if not NORMALIZE:
        q = tl.load(p_ptr + at, mask=inside, other=0.0)
    for slot in range(TOP_K):
        place = row.to(tl.int64) * TOP_K + slot
        here = tl.load(ids_ptr + place, mask=row < R, other=-1)[:, None] == expert
        own = tl.load(dweights_ptr + place, mask=row < R, other=0.0)[:, None]
        d = tl.where(here, own, d)
        if NORMALIZE:
            q = tl.where(here, tl.load(weights_ptr + place, mask=row < R, other=0.0)[:, None], q)
    dz = q * (d - _tree(q * d, inside, ROWS, BLOCK_E))
    tl.store(dlogits_ptr + at, dz.to(dlogits_ptr.dtype.element_ty), mask=inside)


def _choose_fake(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = logits.shape
    ids, weights = (logits.new_empty((rows, top_k), dtype=d) for d in (torch.int32, torch.float32))
    return ids, weights, logits.new_empty((0 if normalize else rows, experts))


def choose_fwd(
    logits: Tensor, top_k: int, normalize: bool, schedule: RouterSchedule | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by logits [R, E] fp32.

    Returns ids, weights [R, k], and probabilities unless they are normalized.
    """
    ids, weights, p = _choose_fake(logits, top_k, normalize)
    rows, experts = logits.shape
    if rows:
        block = next_power_of_2(experts)
        schedule = schedule or pick(rows, block)
        overlap = has_tma(logits.device)
        choose_kernel[(cdiv(rows, schedule.rows),)](
            logits, ids, weights, p, rows, experts, TOP_K=top_k, NORMALIZE=normalize,
            ROWS=schedule.rows, BLOCK_E=block, OVERLAP=overlap, launch_pdl=overlap,
            num_warps=schedule.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, weights, p


def logits_bwd(
    dweights: Tensor,
    ids: Tensor,
    weights: Tensor,
    p: Tensor | None,
    experts: int,
    dtype: torch.dtype,
    schedule: RouterSchedule | None = None,
) -> Tensor:
    """dlogits [R, E] in `dtype`; `p` is None where weights are normalized."""
    rows, top_k = ids.shape
    dlogits = weights.new_empty((rows, experts), dtype=dtype)
    if rows:
        block = next_power_of_2(experts)
        schedule = schedule or pick(rows, block)
        logit_gradients_kernel[(cdiv(rows, schedule.rows),)](
            dweights.contiguous(), ids, weights, p, dlogits, rows, experts, TOP_K=top_k,
            NORMALIZE=p is None, ROWS=schedule.rows, BLOCK_E=block, num_warps=schedule.warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return dlogits


router_choice_op = kernel_op(fake=_choose_fake, name="router_choice_op")(choose_fwd)
router_logits_bwd_op = kernel_op(
    fake=lambda dweights, ids, weights, p, experts, dtype: weights.new_empty(
        (weights.shape[0], experts), dtype=dtype
    ),
    name="router_logits_bwd_op",
)(logits_bwd)


def route_with_logits(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    normalize: bool,
    weight_grad: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose each row's experts.

    Args:
        x: [R, H].
        weight: [E, H] of the router.
        top_k: experts of a row, 1 to E.
        normalize: whether the weights of a row's experts are divided by their sum.
        weight_grad: buffer that dweight is folded into; without it autograd receives dweight,
            folded from zero.

    Returns:
        expert_ids [R, k] int32, ascending in each row, weights [R, k] fp32 in the same order, and
        the logits [R, E] fp32. Weights and logits are differentiable in x and weight.
    """
    require_operands("router", x=x, weight=weight)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"router: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; "
            "x is [rows, hidden] and weight [experts, hidden]."
        )
    if not 1 <= top_k <= weight.shape[0]:
        raise ValueError(f"router: top_k {top_k}; 1 to {weight.shape[0]}, the number of experts.")
    return apply(RouterFunction, x, weight, top_k, normalize, weight_grad)


class RouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, top_k, normalize, weight_grad):
        logits = matmul_nt(x, weight)
        own = router_choice_op if logits.is_cuda else choose
        expert_ids, weights, probabilities = own(logits, top_k, normalize)
        ctx.mark_non_differentiable(expert_ids)
        ctx.set_materialize_grads(False)
        kept = None if normalize else probabilities
        ctx.save_for_backward(x, weight, expert_ids, weights, kept)
        ctx.weight_grad = weight_grad
        return expert_ids, weights, logits

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        x, weight, expert_ids, weights, probabilities = ctx.saved_tensors
        _, dweights, given = grad_outputs
        if dweights is None:
            dweights = torch.zeros_like(weights)
        own = router_logits_bwd_op if x.is_cuda else logit_gradients
        wide = x.dtype if given is None else torch.float32
        dlogits = own(dweights, expert_ids, weights, probabilities, weight.shape[0], wide)
        if given is not None:
            dlogits = (dlogits + given).to(x.dtype)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = matmul_nn(dlogits, weight, out_dtype=x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = fold_parameter(
                ctx,
                weight,
                ctx.weight_grad,
                lambda g, fresh: fold_outer(g, dlogits, x, fresh=fresh),
                overwrites=True,
            )
        return dx, dweight, None, None, None


def choose(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by fp32 logits [R, E] on a CPU.

    Returns expert_ids [R, k] int32, weights [R, k] and probabilities [R, E] fp32.
    """
    # Of equal values a stable sort keeps the order of the ids.
    order = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.sort(dim=-1, descending=True, stable=True).indices
    expert_ids = order[:, :top_k].sort(dim=-1).values
    p = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    p = p / tree_sum(p).unsqueeze(-1)
    weights = p.gather(1, expert_ids)
    if normalize:
        chosen = torch.zeros_like(p).scatter_(1, expert_ids, weights)
        weights = weights / tree_sum(chosen).unsqueeze(-1)
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    return expert_ids.to(torch.int32), weights.masked_fill(~finite, torch.nan), p


def logit_gradients(
    dweights: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    probabilities: Tensor | None,
    num_experts: int,
    dtype: torch.dtype,
) -> Tensor:
    """dlogits [R, E] in `dtype` on a CPU; `probabilities` [R, E] is None where weights are
    normalized."""
    index = expert_ids.long()
    d = dweights.new_zeros((dweights.shape[0], num_experts), dtype=torch.float32)
    q = torch.zeros_like(d).scatter_(1, index, weights) if probabilities is None else probabilities
    d.scatter_(1, index, dweights)
    return (q * (d - tree_sum(q * d).unsqueeze(-1))).to(dtype)


def route_reference(
    x: Tensor, weight: Tensor, top_k: int, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """`route_with_logits` in fp64, for accuracy tests only."""
    p = (x.double() @ weight.double().t()).softmax(-1)
    order = p.sort(dim=-1, descending=True, stable=True).indices
    expert_ids = order[:, :top_k].sort(dim=-1).values
    weights = p.gather(1, expert_ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return expert_ids.to(torch.int32), weights
