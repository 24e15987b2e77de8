"""Matmul and the gradient fold against cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import batch_invariant_ops, not_installed
from benchmarks.suite import Case, normal
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.matmul.schedules import pick, prefers_library

GRAPH_ROWS = 256
"""Up to so many rows a product is timed in a CUDA graph, as rollout runs it."""

Weights = Sequence[tuple[int, int]]


def product_cases(layout: str, weights: Weights, rows: Sequence[int]) -> list[Case]:
    """Every weight [n, k] with every number of rows.

    Layout "nt" is y = x weight^T; "nn" is dx = dy weight, where K is the weight's first dimension.
    """
    work = {"nt": "matmul forward", "nn": "matmul dX"}[layout]
    sizes = [weight if layout == "nt" else weight[::-1] for weight in weights]
    return [
        Case(work=work, shape={"m": m, "n": n, "k": k}, run=partial(_product, layout, m, n, k))
        for n, k in sizes
        for m in rows
    ]


def _product(layout: str, m: int, n: int, k: int, bench: Machine) -> dict[str, Any]:
    """[m, k] times a weight, [n, k] or [k, n], that gives n columns."""
    graph = m <= GRAPH_ROWS
    copies = bench.copies(2 * (m * k + n * k)) if graph else 1
    weight_shape = (n, k) if layout == "nt" else (k, n)
    operands = [(normal(bench, m, k), normal(bench, *weight_shape)) for _ in range(copies)]
    ours = partial(matmul_nt if layout == "nt" else matmul_nn, out_dtype=torch.bfloat16)
    as_stock = [(x, w.t() if layout == "nt" else w) for x, w in operands]
    ways = {"cublas": torch.mm}
    if module := batch_invariant_ops():
        ways["batch_invariant_ops"] = module.matmul_persistent
    others = {n: Contestant([partial(way, *pair) for pair in as_stock]) for n, way in ways.items()}
    race = Race(
        ours=Contestant([partial(ours, x, w) for x, w in operands]),
        stock={"cublas": others.pop("cublas")},
        peers=others,
        unavailable=not_installed("batch_invariant_ops"),
        clock="graph" if graph else "events",
        moved_bytes=2.0 * (m * k + n * k + m * n),
        operations=2.0 * m * n * k,
    )
    fields = bench.measure(race)
    schedule = pick(m, n, k, torch.bfloat16, layout, True).name
    if not graph and prefers_library(m, n, k, torch.bfloat16, layout):
        schedule = f"library where certified, else {schedule}"
    return fields | {"schedule": schedule}


def gradient_fold_cases(weights: Weights, tokens: Sequence[int]) -> list[Case]:
    """dW continued in an fp32 buffer."""
    return [
        Case(work="dW fold", shape={"tokens": t, "n": n, "k": k}, run=partial(_fold, t, n, k))
        for n, k in weights
        for t in tokens
    ]


def _fold(tokens: int, n: int, k: int, bench: Machine) -> dict[str, Any]:
    dy, x = normal(bench, tokens, n), normal(bench, tokens, k)
    ours, stock = (torch.zeros(n, k, device=bench.device) for _ in range(2))

    def fold() -> Tensor:
        fold_outer(ours, dy, x)
        return ours

    def multiply_and_add() -> Tensor:
        return stock.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))

    race = Race(
        ours=Contestant.of(fold),
        stock={"cublas fp32 + add": Contestant.of(multiply_and_add)},
        moved_bytes=2.0 * tokens * (n + k) + 8.0 * n * k,
        operations=2.0 * tokens * n * k,
    )
    return bench.measure(race)
