"""The sampled audit of expert products by a winner of `tune`, as `matmul.winner_audit` for linear
layers: some calls are computed again, by a schedule for any GPU and any operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import unrecorded
from rl_consistency.kernels.core.cache.tuned_schedules import picked_once, tuned_schedules
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.experts.products_triton import described
from rl_consistency.kernels.experts.schedules import (
    Product,
    ProductSchedule,
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
    While kernels compile ahead, an audit's is compiled and nothing counted.
    """
    layout = "nn" if product == "nn" else "nt"
    n, k = weights.shape[1:] if layout == "nt" else weights.shape[:0:-1]
    sizes = len(y), len(weights), n // 2 if product == "gate_up" else n, k
    tma = described(weights, layout)
    tuned = _tuned_product(product, *sizes, weights.dtype, tma, weights.device)
    if tuned is None or (y.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if not (compiles_only() or audit.due()):
        return
    with unrecorded():
        expected = again(pick_product(product, *sizes, weights.dtype, False))
        if not compiles_only():
            audit.record(tuned, pairs_of(y, first), pairs_of(expected, first))


def pairs_of(x: Tensor, first: Tensor) -> Tensor:
    """x [P, N], zeros past the last pair, `first[E]`."""
    return x.masked_fill(torch.arange(len(x), device=x.device)[:, None] >= first[-1], 0.0)


@picked_once
def _tuned_product(
    product: Product, pairs: int, experts: int, n: int, k: int, dtype: torch.dtype, tma: bool,
    device: torch.device,
) -> TunedProduct | None:  # fmt: skip
    work = product_work(product, dtype, tma, pairs, experts, n, k)
    winner = tuned_schedules(device).winner(work)
    return None if winner is None else TunedProduct(device, work, winner.schedule)
