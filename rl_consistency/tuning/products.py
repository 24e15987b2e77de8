"""The works of weights: products in both layouts, dW, and the fused launches for few rows.

A work's `seconds` are a bound from below by `COPY_BANDWIDTH` and `MATMUL_RATE`, times its calls:
they order the works, and no figure is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.core.device import has_tma, sm_count
from rl_consistency.kernels.gradient_fold import schedules as fold_schedules
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer
from rl_consistency.kernels.linear import schedules as few_rows
from rl_consistency.kernels.linear.few_rows_triton import gate_up_glu_fwd, qkv_fwd
from rl_consistency.kernels.matmul import schedules
from rl_consistency.kernels.matmul.cublaslt import library_outer, library_product
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, matmul_fwd
from rl_consistency.tuning.work import Work

COPY_BANDWIDTH, MATMUL_RATE = 3e12, 6e14

TUNED_COLUMNS = 8
"""Columns are a multiple of this, as descriptors and the library need."""


def drawn(device: torch.device, dtype: torch.dtype, *shapes: Sequence[int]) -> tuple[Tensor, ...]:
    """Normal matrices whose every 37th column is an outlier: sums round at many scales, far from
    the largest fp16. They leave the process's random state as it is."""
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for shape in shapes:
        values = torch.randn(tuple(shape), device=device, dtype=dtype, generator=generator)
        values *= shape[-1] ** -0.25
        values[..., ::37] *= 30
        found.append(values)
    return tuple(found)


def product(
    device: torch.device, layout: str, m: int, n: int, k: int, dtype: torch.dtype,
    out_dtype: torch.dtype, calls: float = 1.0, own: Sequence[schedules.Schedule] | None = None,
) -> Work:  # fmt: skip
    """[m, k] times a weight: y = x W^T ("nt", weight [n, k]) or dx = dy W ("nn", weight [k, n]).

    `own` are its schedules; None are those worth timing.
    """
    tma = has_tma(device)
    weight = (n, k) if layout == "nt" else (k, n)

    def call(schedule: schedules.Schedule, a: Tensor, b: Tensor) -> Tensor:
        fitting = schedule.within(SHARED_BYTES, dtype.itemsize, out_dtype.itemsize)
        return matmul_fwd(a, b, None, layout, out_dtype, fitting)

    def library(a: Tensor, b: Tensor) -> Tensor:
        return library_product(a, b, None, layout, out_dtype)

    covered = m >= 2 and dtype != torch.float32
    moved = (m * k + n * k) * dtype.itemsize + m * n * out_dtype.itemsize
    return Work(
        op="matmul",
        shape={"layout": layout, "m": m, "n": n, "k": k},
        operands=partial(drawn, device, dtype, (m, k), weight),
        candidates=_by_name(own or schedules.candidates(m, dtype, tma=tma), call),
        picked=schedules.pick(m, n, k, dtype, layout, tma, out_dtype).name,
        others={"cublaslt": library} if covered else {},
        entry=schedules.product_work(layout, dtype, out_dtype, _described(tma, dtype), m, n, k),
        moved_bytes=moved,
        seconds=calls * least_seconds(moved, m * n * k),
    )


def fold(
    device: torch.device, tokens: int, n: int, k: int, dtype: torch.dtype, calls: float = 1.0, *,
    fresh: bool = True,
) -> Work:  # fmt: skip
    """dW [n, k] fp32 = dy^T x over `tokens`; not `fresh` continues a gradient."""
    tma = has_tma(device)

    def operands() -> tuple[Tensor, ...]:
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        dy, x = drawn(device, dtype, (tokens, n), (tokens, k))
        return dy, x, torch.zeros(n, k, dtype=wide, device=device)

    def call(
        schedule: fold_schedules.FoldSchedule, dy: Tensor, x: Tensor, gradient: Tensor
    ) -> Tensor:
        launch_outer(gradient, dy, x, fresh, schedule)
        return gradient

    def library(dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        return library_outer(dy, x, gradient)

    covered = fresh and dtype != torch.float32 and tokens % 16 == 0
    moved = tokens * (n + k) * dtype.itemsize + n * k * 4
    processors = sm_count(device)
    return Work(
        op="fold",
        shape={"tokens": tokens, "n": n, "k": k},
        operands=operands,
        candidates=_by_name(fold_schedules.candidates(dtype, tma=tma), call),
        picked=fold_schedules.pick(tokens, n, k, dtype, tma=tma, processors=processors).name,
        others={"cublaslt": library} if covered else {},
        entry=fold_schedules.fold_work(tokens, n, k, dtype, tma=tma),
        moved_bytes=moved,
        seconds=calls * least_seconds(moved, tokens * n * k),
    )


def fused_qkv(
    device: torch.device, m: int, columns: tuple[int, int, int], k: int, dtype: torch.dtype,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """q, k and v of few rows in one launch."""

    def call(schedule: schedules.Schedule, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        wq, wk, wv = weights
        return qkv_fwd(x, wq, wk, wv, None, None, None, schedule)

    total = sum(columns)
    moved = (total * k + m * (k + total)) * dtype.itemsize
    found = few_rows.few_rows_candidates(few_rows.QKV, dtype, tma=False)
    return Work(
        op="qkv",
        shape={"m": m, "n": "+".join(map(str, columns)), "k": k},
        operands=partial(drawn, device, dtype, (m, k), *((n, k) for n in columns)),
        candidates=_by_name(found, call),
        picked=few_rows.pick_qkv(m, dtype, columns, k).name,
        entry=few_rows.qkv_work(dtype, m, columns, k),
        moved_bytes=moved,
        seconds=calls * least_seconds(moved, m * total * k),
    )


def fused_gate_up(
    device: torch.device, m: int, n: int, k: int, dtype: torch.dtype, activation: str,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """Gate, up and their product for few rows in one launch."""
    tma = has_tma(device)

    def call(schedule: schedules.Schedule, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        # A stage holds two weight tiles.
        fitting = schedule.within(SHARED_BYTES // 2, dtype.itemsize, dtype.itemsize)
        return gate_up_glu_fwd(x, gate, up, activation, fitting)

    moved = (2 * n * k + m * (k + n)) * dtype.itemsize
    return Work(
        op="gate_up",
        shape={"m": m, "n": n, "k": k},
        operands=partial(drawn, device, dtype, (m, k), (n, k), (n, k)),
        candidates=_by_name(few_rows.few_rows_candidates(few_rows.GATE_UP, dtype, tma=tma), call),
        picked=few_rows.pick_gate_up(m, n, dtype, tma).name,
        entry=few_rows.gate_up_work(dtype, tma, m, n, k),
        moved_bytes=moved,
        seconds=calls * least_seconds(moved, 2 * m * n * k),
    )


def _by_name(found: Sequence[Any], call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {schedule.name: partial(call, schedule) for schedule in found}


def _described(tma: bool, dtype: torch.dtype) -> bool:
    return tma and dtype != torch.float32


def least_seconds(moved: float, products: float) -> float:
    """A bound from below for moving so many bytes and multiplying so often."""
    return max(moved / COPY_BANDWIDTH, 2 * products / MATMUL_RATE)
