"""Matmul and the gradient fold against cuBLAS."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import peer
from benchmarks.suite import normal
from benchmarks.timing import Contestant, Machine, Race
from benchmarks.tune.winners import own_winners
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import rows_bucket
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.cublaslt import LIBRARY_ROWS, certified_to_the_row
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.matmul.schedules import pick
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning import products
from rl_consistency.tuning.tune import tune_works
from rl_consistency.tuning.work import fewer_rows, with_fewer

GRAPH_ROWS = 256
"""Up to so many rows a product is timed in a CUDA graph, as rollout runs it."""


def product(
    layout: str, bench: Machine, m: int, n: int, k: int, graph_rows: int = GRAPH_ROWS
) -> dict[str, Any]:
    """[m, k] times a weight that gives n columns; in a graph for up to `graph_rows` rows.

    Layout "nt" is y = x weight^T with a weight [n, k]; "nn" is dx = dy weight with a weight [k, n].
    """
    graph = m <= graph_rows
    copies = bench.copies(2 * (m * k + n * k)) if graph else 1
    weight_shape = (n, k) if layout == "nt" else (k, n)
    operands = [(normal(bench, m, k), normal(bench, *weight_shape)) for _ in range(copies)]
    ours = partial(matmul_nt if layout == "nt" else matmul_nn, out_dtype=torch.bfloat16)
    as_stock = [(x, w.t() if layout == "nt" else w) for x, w in operands]
    ways = {"cublas": torch.mm}
    if module := peer("batch_invariant_ops"):
        ways["batch_invariant_ops"] = module.matmul_persistent
    others = {n: Contestant([partial(way, *pair) for pair in as_stock]) for n, way in ways.items()}
    race = Race(
        ours=Contestant(
            [partial(ours, x, w) for x, w in operands],
            context=certified_to_the_row if graph else nullcontext,
        ),
        stock={"cublas": others.pop("cublas")},
        peers=others,
        clock="graph" if graph else "events",
        moved_bytes=2.0 * (m * k + n * k + m * n),
        operations=2.0 * m * n * k,
    )
    fields = bench.measure(race)
    sizes = m, n, k, torch.bfloat16, layout
    schedule = pick(*sizes, has_tma(bench.device), device=bench.device).name
    if m >= LIBRARY_ROWS:
        schedule = f"library where certified, else {schedule}"
    return fields | {"schedule": schedule}


def tuned_product(
    layout: str, bench: Machine, m: int, n: int, k: int, graph_rows: int = GRAPH_ROWS
) -> dict[str, Any]:
    """`product` once `tune` has measured its bucket of rows, as it does for a policy."""
    bucket = rows_bucket(m)
    largest, fewer = (
        products.product(bench.device, layout, rows, n, k, torch.bfloat16, torch.bfloat16)
        for rows in (bucket, fewer_rows(bucket))
    )
    (work,) = with_fewer([largest], [fewer])
    with own_winners(bench.device) as store:
        with numeric_settings(), torch.no_grad():
            report = tune_works([work], bench, store, clock=lambda: 0.0)
        if report.withdrawn:
            raise ConsistencyError(f"candidates gave other bytes: {report.withdrawn}")
        return product(layout, bench, m, n, k, graph_rows)


def gradient_fold(bench: Machine, tokens: int, n: int, k: int) -> dict[str, Any]:
    """dW continued in an fp32 buffer."""
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
