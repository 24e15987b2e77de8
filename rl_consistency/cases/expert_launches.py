"""Launches of experts: their products, and the gradients of their weights, at even routing.

The host does not know a call's routing, so no pick can depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.case import Setting, weight_scale
from rl_consistency.cases.launches import Launch
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core.device import has_tma, sm_count
from rl_consistency.kernels.experts import schedules
from rl_consistency.kernels.experts.fold_triton import describes_rows, find_runs, fold_runs
from rl_consistency.kernels.experts.library import library_product
from rl_consistency.kernels.experts.pairs_triton import (
    activate_pairs,
    expert_pairs_op,
    gather_rows,
)
from rl_consistency.kernels.experts.products_triton import MOST_STEPS, gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.schedules import Product
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype

SEQUENCE = 1024
"""Tokens of a sequence whose gradient is timed."""


def expert_product(
    setting: Setting, product: Product, rows: int, top_k: int, experts: int, n: int, k: int,
    activation: str = "silu", *, by_row: bool = False,
) -> Launch:  # fmt: skip
    """`product` of `rows` rows, each at `top_k` experts, with weights of n columns; see `Product`.

    `by_row`: the operand has a row for each row of the call, not one for each pair.
    """
    fused, pairs = product == "gate_up", rows * top_k
    by_row = by_row or fused
    weight = {"gate_up": (2 * n, k), "nt": (n, k), "nn": (k, n)}[product]
    layout = "nn" if product == "nn" else "nt"

    def operands() -> tuple[Tensor, ...]:
        # The output of a gate goes with the square of `a` and must fit fp16.
        a = setting.drawn((rows if by_row else pairs, k), 0, 0.005 if fused else 0.1)
        weights = setting.drawn((experts, *weight), 1, weight_scale(k))
        found, _, first = _pairs(_even_ids(rows, top_k, experts, device), experts)
        return a, weights, first, found

    def run(schedule: Any, a: Tensor, weights: Tensor, first: Tensor, found: Tensor) -> Tensor:
        if fused:
            return gate_up_fwd(a, weights, first, found, top_k, activation, False, schedule)[0]
        return product_fwd(a, weights, layout, first, found, top_k, by_row, schedule)

    def library(a: Tensor, weights: Tensor, first: Tensor, found: Tensor) -> Tensor:
        own = gather_rows(a, found, first, top_k) if by_row else a
        y = library_product(own, weights, layout, first)
        return activate_pairs(y, first, activation) if fused else y

    device, dtype = setting.device, setting.dtype
    tma = has_tma(device) and (product != "nn" or k % MOST_STEPS == 0)
    sizes = pairs, experts, n, k
    used = min(pairs, experts)
    return Launch(
        name=f"experts {product}",
        operands=operands,
        run=run,
        schedules=schedules.product_candidates(product, dtype, tma=tma),
        library={"grouped_mm": library} if dtype == torch.bfloat16 else {},
        op=f"experts {product}",
        shape={"rows": rows, "k_of": f"{top_k}/{experts}", "n": n, "k": k},
        picked=schedules.pick_product(product, *sizes, dtype, tma),
        entry=schedules.product_work(product, dtype, tma, *sizes),
        moved=(pairs * (k + n) + used * weight[0] * weight[1]) * dtype.itemsize,
        products=pairs * weight[0] * weight[1],
    )


def expert_fold(
    setting: Setting, rows: int, top_k: int, experts: int, n: int, k: int, *,
    dy_by_row: bool = False,
) -> Launch:  # fmt: skip
    """The gradients [experts, n, k] over `rows` tokens of sequences of `SEQUENCE`, from zero."""
    pairs, device, dtype = rows * top_k, setting.device, setting.dtype

    def operands() -> tuple[Tensor, ...]:
        counts = (rows, pairs) if dy_by_row else (pairs, rows)
        dy, x = setting.drawn((counts[0], n), 0), setting.drawn((counts[1], k), 1)
        ids = _even_ids(rows, top_k, experts, device)
        _, places, _ = _pairs(ids, experts)
        starts = range(0, rows, SEQUENCE)
        layout = PackedSequences.of(starts, [min(SEQUENCE, rows - start) for start in starts])
        runs = find_runs(ids, places, layout, experts)
        gradient = torch.zeros(experts, n, k, dtype=accumulator_dtype(x), device=device)
        return dy, x, *runs, gradient

    def run(schedule: Any, dy: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
        *runs, gradient = rest
        fold_runs(gradient, dy, x, *runs, dy_by_row=dy_by_row, fresh=True, schedule=schedule)
        return gradient

    sizes, tma = (pairs, experts, n, k), describes_rows(device, dtype, n, k)
    return Launch(
        name="experts fold",
        operands=operands,
        run=run,
        schedules=schedules.fold_candidates(dtype, tma=tma),
        op="experts fold",
        shape={"rows": rows, "k_of": f"{top_k}/{experts}", "n": n, "k": k},
        picked=schedules.pick_fold(*sizes, dtype, tma=tma, processors=sm_count(device)),
        entry=schedules.fold_work(dtype, tma, *sizes),
        moved=pairs * (n + k) * dtype.itemsize + experts * n * k * 4,
        products=pairs * n * k,
    )


def _even_ids(rows: int, top_k: int, experts: int, device: torch.device) -> Tensor:
    """[rows, top_k] int32: each row's experts, drawn alike; the same at each call."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=-1)[:, :top_k]
    return ids.sort(dim=-1).values.to(device, torch.int32)


def _pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    start, length = ids.new_zeros(1), ids.new_full((1,), len(ids))
    return expert_pairs_op(ids, start, length, experts)
