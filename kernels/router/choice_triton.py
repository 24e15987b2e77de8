"""The choice of experts on CUDA, and the gradient of its logits: one pass over the logits each.

Shapes: logits [R, E] fp32 -> expert_ids [R, k] int32, weights [R, k], probabilities [R, E] fp32.
Dtypes and rounding points, order, invariance: those of `router`.
Errors: none. Cost: memory-bound; k searches of a row in registers.

A maximum and a minimum have one value in every order, so only the sums need their tree.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.reduction.tree_fold_triton import exp_fp32, tree_fold
from rl_consistency.kernels.router.schedules import Schedule, pick


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
    ids = logits.new_empty((rows, top_k), dtype=torch.int32)
    return (
        ids,
        logits.new_empty((rows, top_k)),
        logits.new_empty((0 if normalize else rows, experts)),
    )


def choose_fwd(
    logits: Tensor, top_k: int, normalize: bool, schedule: Schedule | None = None
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
    schedule: Schedule | None = None,
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
