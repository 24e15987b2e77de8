"""Schedules of the fused products, and for how many rows they stand for the separate ones.

All schedules give the same bytes, which a test shows. The rules were read off times on an H200 in
CUDA graphs with cold weights: nine models of 0.5 to 8 billion parameters, 1 to 256 rows.
"""

from __future__ import annotations

import torch

from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.core.reduction_order import FP32_STEP
from rl_consistency.kernels.matmul.schedules import Schedule, table_of

QKV = table_of(
    "pointer-16x16x128-w4-s6",
    "pointer-16x32x128-w4-s4",
    "pointer-16x32x128-w4-s5",
    "pointer-64x16x128-w4-s4",
    "pointer-64x32x64-w4-s6",
    "pointer-64x64x64-w4-s6",
)
"""Schedules of `few_rows_triton.qkv_fwd` in bf16 and fp16."""

GATE_UP = table_of(
    "tma-16x32x128-w4-s3",
    "tma-32x64x64-w4-s4",
    "tma-64x16x128-w4-s4",
    "tma-64x32x64-w4-s4",
    "tma-64x32x128-w4-s3",
    "tma-64x64x64-w4-s3",
    "tma-64x64x64-w4-s4",
    "tma-128x64x64-w4-s3",
    "pointer-16x32x64-w4-s6",
    "pointer-16x32x128-w4-s3",
    "pointer-32x32x128-w4-s4",
    "pointer-64x32x64-w4-s4",
)
"""Schedules of `few_rows_triton.gate_up_glu_fwd` in bf16 and fp16: two weight tiles per stage."""

FEW_ROWS_FP32 = table_of(f"pointer-16x32x{FP32_STEP}-w4-s3", f"pointer-32x32x{FP32_STEP}-w4-s3")
"""Schedules of both fused products in fp32."""

FUSED_ROWS, MOST_FUSED_ROWS = 64, 256
"""Rows up to which one launch computes q, k and v, or gate, up and GLU. The first are for all
weights, the second for those whose tiles all run at once: a second wave costs more than separate
launches do."""

SINGLES, PAIRS, TRIPLES = 132, 2 * 132, 3 * 132
"""Programs that an H200 holds at a time, one to three to a multiprocessor."""

_BY_NAME = {s.name: s for s in (*QKV, *GATE_UP, *FEW_ROWS_FP32)}


def fuses_qkv(m: int, columns: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether m rows compute q, k and v of so many `columns` in one launch."""
    if m <= FUSED_ROWS:
        return True
    tiles = cdiv(m, 64) * sum(cdiv(n, 64) for n in columns)
    return dtype != torch.float32 and m <= MOST_FUSED_ROWS and tiles <= PAIRS


def fuses_gate_up(m: int, n: int, dtype: torch.dtype, tma: bool) -> bool:
    """Whether m rows compute gate, up and GLU in one launch; n are the columns of each weight."""
    if m <= FUSED_ROWS:
        return True
    if not tma or dtype == torch.float32 or m > MOST_FUSED_ROWS:
        return False
    return cdiv(m, 64) * cdiv(n, 64) <= TRIPLES or cdiv(m, 128) * cdiv(n, 64) <= PAIRS


def few_rows_candidates(
    table: tuple[Schedule, ...], dtype: torch.dtype, *, tma: bool
) -> tuple[Schedule, ...]:
    """Schedules of `QKV` or `GATE_UP` that a dtype and operands admit."""
    if dtype == torch.float32:
        return FEW_ROWS_FP32
    return tuple(s for s in table if tma or s.kind == "pointer")


def qkv_work(dtype: torch.dtype, m: int, columns: tuple[int, ...], k: int) -> str:
    """The work of `pick_qkv`; `columns` are those of q, k and v."""
    return work_name("qkv", dtype, "n" + "+".join(map(str, columns)), f"k{k}", rows=m)


def gate_up_work(dtype: torch.dtype, tma: bool, m: int, n: int, k: int) -> str:
    """The work of `pick_gate_up`."""
    return work_name("gate_up", dtype, "tma" if tma else "pointer", f"n{n}", f"k{k}", rows=m)


@picked_once
def pick_qkv(
    m: int, dtype: torch.dtype, columns: tuple[int, ...] = (), k: int = 0,
    device: torch.device | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of `few_rows_triton.qkv_fwd` for m rows; `columns` are those of q, k and v."""
    own = few_rows_candidates(QKV, dtype, tma=False)
    if (found := choose(device, qkv_work(dtype, m, columns, k), own)) is not None:
        return found
    if dtype == torch.float32:
        return _pick_fp32(m)
    tiles = sum(cdiv(n, 32) for n in columns)
    if m <= 16:
        return _BY_NAME["pointer-16x16x128-w4-s6" if tiles <= 64 else "pointer-16x32x128-w4-s5"]
    if m <= 32:
        return _BY_NAME[f"pointer-16x32x128-w4-s{5 if 2 * tiles <= PAIRS else 4}"]
    if m <= 64:
        return _BY_NAME[
            "pointer-64x16x128-w4-s4" if 2 * tiles <= PAIRS else "pointer-64x32x64-w4-s6"
        ]
    few = cdiv(m, 64) * tiles <= SINGLES
    return _BY_NAME["pointer-64x32x64-w4-s6" if few else "pointer-64x64x64-w4-s6"]


@picked_once
def pick_gate_up(
    m: int, n: int, dtype: torch.dtype, tma: bool, k: int = 0, device: torch.device | None = None
) -> Schedule:
    """The schedule of `few_rows_triton.gate_up_glu_fwd` for m rows and n columns of each weight."""
    own = few_rows_candidates(GATE_UP, dtype, tma=tma)
    if (found := choose(device, gate_up_work(dtype, tma, m, n, k), own)) is not None:
        return found
    if dtype == torch.float32:
        return _pick_fp32(m)
    if m <= 16:
        return _BY_NAME["pointer-16x32x64-w4-s6" if n < 4096 else "pointer-16x32x128-w4-s3"]
    if not tma:
        return _BY_NAME["pointer-32x32x128-w4-s4" if m <= 32 else "pointer-64x32x64-w4-s4"]
    if m <= 32:
        return _BY_NAME["tma-16x32x128-w4-s3" if n <= 8192 else "tma-32x64x64-w4-s4"]
    if m <= 64 and cdiv(n, 16) <= PAIRS:
        return _BY_NAME["tma-64x16x128-w4-s4"]
    if m <= 64 and cdiv(n, 32) <= TRIPLES:
        # All tiles run at once, two or three to a multiprocessor.
        two = cdiv(n, 32) <= PAIRS
        return _BY_NAME["tma-64x32x128-w4-s3" if two else "tma-64x32x64-w4-s4"]
    tiles = cdiv(m, 64) * cdiv(n, 64)
    if m > 64 and tiles > TRIPLES:
        return _BY_NAME["tma-128x64x64-w4-s3"]
    # With one stage less a third program fits a multiprocessor; that pays if it saves a wave.
    fewer = cdiv(tiles, TRIPLES) < cdiv(tiles, PAIRS)
    return _BY_NAME["tma-64x64x64-w4-s3" if fewer else "tma-64x64x64-w4-s4"]


def _pick_fp32(m: int) -> Schedule:
    return _BY_NAME[f"pointer-{16 if m <= 16 else 32}x32x{FP32_STEP}-w4-s3"]
