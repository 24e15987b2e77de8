"""The sampled audit of expert products by a winner of `tune`, as `matmul.winner_audit` for linear
layers: some calls are computed again, by a schedule for any GPU and any operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import unrecorded
from rl_consistency.kernels.core.cache.tuned_schedules import picked_once, tuned_schedules
from rl_consistency.kernels.experts.pairs_triton import expert_pairs_op
from rl_consistency.kernels.experts.products_triton import described, gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.rows_triton import combine_fwd
from rl_consistency.kernels.experts.schedules import (
    Product,
    ProductSchedule,
    few_work,
    pick_product,
    product_work,
)
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.winner_audit import TunedProduct


def audit_winner(
    product: Product,
    weights: Tensor,
    first: Tensor,
    y: Tensor,
    again: Callable[[ProductSchedule], Tensor],
) -> None:
    """Compute y [P, N] again, if a winner computed it and an audit is due.

    `again` is the call by another schedule. Nothing is computed while a CUDA graph is captured.
    """
    layout = "nn" if product == "nn" else "nt"
    n, k = weights.shape[1:] if layout == "nt" else weights.shape[:0:-1]
    sizes = len(y), len(weights), n // 2 if product == "gate_up" else n, k
    tma = described(weights, layout)
    tuned = _tuned_product(product, *sizes, weights.dtype, tma, weights.device)
    if tuned is None or not _due(y):
        return
    with unrecorded():
        expected = again(pick_product(product, *sizes, weights.dtype, False))
        audit.record(tuned, pairs_of(y, first), pairs_of(expected, first))


def audit_few_winner(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    starts: Tensor,
    lens: Tensor,
    activation: str,
    y: Tensor,
) -> None:
    """`audit_winner` for `few_rows_fwd`, whose rows are computed again by pairs. Of few rows only
    one runs by a winner."""
    top_k, (experts, hidden, width) = expert_ids.shape[1], down.shape
    if len(x) > 1:
        return
    tuned = _tuned_few(top_k, experts, hidden, width, x.dtype, x.device)
    if tuned is None or not _due(y):
        return
    with unrecorded():
        pairs, places, first = expert_pairs_op(expert_ids, starts, lens, experts)
        sizes = len(pairs), experts
        plain = pick_product("gate_up", *sizes, width, hidden, x.dtype, False)
        given = first, pairs, top_k
        activated, _ = gate_up_fwd(x, gate_up, *given, activation, False, plain)
        plain = pick_product("nt", *sizes, hidden, width, x.dtype, False)
        outputs = product_fwd(activated, down, "nt", *given, False, plain)
        expected = combine_fwd(outputs, places, weights)
        audit.record(tuned, y, expected)


def _due(y: Tensor) -> bool:
    """Whether this call is audited; counts it if it may be."""
    if y.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return audit.due()


def pairs_of(x: Tensor, first: Tensor) -> Tensor:
    """x [P, N], zeros past the last pair, `first[E]`."""
    return x.masked_fill(torch.arange(len(x), device=x.device)[:, None] >= first[-1], 0.0)


@picked_once
def _tuned_product(
    product: Product, pairs: int, experts: int, n: int, k: int, dtype: torch.dtype, tma: bool,
    device: torch.device,
) -> TunedProduct | None:  # fmt: skip
    return _tuned(device, product_work(product, dtype, tma, pairs, experts, n, k))


@picked_once
def _tuned_few(
    top_k: int, experts: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device
) -> TunedProduct | None:
    return _tuned(device, few_work(dtype, top_k, experts, hidden, width))


def _tuned(device: torch.device, work: str) -> TunedProduct | None:
    winner = tuned_schedules(device).winner(work)
    return None if winner is None else TunedProduct(device, work, winner.schedule)
