"""Schedules of the matmul order on CUDA, and which one a shape gets.

Every entry gives the same bytes, so a schedule may be chosen by any size, the number of rows
included. A test and `verify` run through `CANDIDATES` and compare.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import log2

import torch

from rl_consistency.kernels.core.matrix_step import FP32_STEP
from rl_consistency.kernels.matmul.table import MEASURED

ACCUMULATOR_BYTES = 4
"""Of one element: fp32."""


@dataclass(frozen=True)
class Schedule:
    """How one product is cut into programs.

    `block_m` counts rows of `a`, `block_n` columns of the result, `block_k` the part of K held at
    once; none of them is part of the order.
    """

    kind: str
    """"tma": tiles copied by descriptor, sm_90 and later; "pointer": any GPU, any strides."""
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    """Row tiles that are walked together before the next column tile, for reuse in L2."""
    persistent: bool = False
    """One program per multiprocessor walks several tiles; its stores overlap the next tile."""
    split_epilogue: bool = False
    """The tile is stored in two halves, which leaves shared memory for one more stage."""
    swap: bool = False
    """Columns of the result are the rows of the MMA: few rows of `a` then fill a warp-group MMA."""
    overlap: bool = False
    """The program starts while the kernel before it ends, and waits for that end before it reads
    or writes anything (programmatic dependent launch, sm_90)."""

    @property
    def name(self) -> str:
        """Short form, unique, as in tables and reports: `tma-128x256x64-w8-s4-persistent`."""
        blocks = f"{self.block_m}x{self.block_n}x{self.block_k}"
        parts = [self.kind, blocks, f"w{self.warps}", f"s{self.stages}"]
        parts += ["persistent"] if self.persistent else []
        parts += ["split"] if self.split_epilogue else []
        parts += ["swap"] if self.swap else []
        parts += ["overlap"] if self.overlap else []
        return "-".join(parts)

    def shared_bytes(self, in_bytes: int, out_bytes: int) -> int:
        """Shared memory of one program, from above, given the bytes per element."""
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * in_bytes
        stored = self.block_m * self.block_n * out_bytes // (2 if self.split_epilogue else 1)
        # A program of one tile stores where its operands were; not so a descriptor's copy of an
        # accumulator as it is, to which the compiler gives room of its own.
        unchanged = self.kind == "tma" and out_bytes == ACCUMULATOR_BYTES
        shares = not self.persistent and not unchanged
        return (max(operands, stored) if shares else operands + stored) + 1024

    def within(self, limit: int, in_bytes: int, out_bytes: int) -> Schedule:
        """This schedule, with fewer stages where `limit` bytes of shared memory ask for it."""
        fitting = self
        while fitting.shared_bytes(in_bytes, out_bytes) > limit and fitting.stages > 1:
            fitting = replace(fitting, stages=fitting.stages - 1)
        return fitting


def _tma(*blocks: int, **flags: bool) -> Schedule:
    return Schedule("tma", *blocks, **flags)  # type: ignore[arg-type]


def _pointer(*blocks: int, **flags: bool) -> Schedule:
    return Schedule("pointer", *blocks, **flags)  # type: ignore[arg-type]


LARGE = (
    _tma(128, 256, 64, 8, 4, persistent=True, split_epilogue=True),
    _tma(128, 256, 64, 8, 3, persistent=True, split_epilogue=True),
    _tma(256, 128, 64, 8, 3, persistent=True, split_epilogue=True),
    _tma(256, 128, 64, 8, 4, persistent=True, split_epilogue=True),
    _tma(128, 128, 64, 8, 4, persistent=True),
    _tma(128, 128, 64, 4, 4, persistent=True),
    _tma(128, 128, 128, 8, 3, persistent=True, split_epilogue=True),
)
"""For many rows: bound by the matrix units."""

MEDIUM = (
    _tma(128, 128, 128, 8, 3),
    _tma(128, 128, 64, 4, 3),
    _tma(128, 64, 64, 4, 5),
    _tma(128, 64, 128, 4, 4),
    _tma(64, 128, 64, 4, 4),
    _tma(64, 128, 128, 4, 4),
    _tma(64, 256, 64, 4, 4),
    _tma(64, 64, 64, 4, 6),
    _tma(64, 64, 128, 4, 5),
    _tma(64, 32, 128, 4, 6),
)
"""For a few hundred rows: tiles small enough to occupy every multiprocessor."""

_ONE_TILE = (
    _tma(16, 16, 256, 4, 6),
    _tma(16, 16, 512, 4, 4),
    _tma(16, 32, 128, 4, 6),
    _tma(16, 32, 256, 4, 4),
    _tma(16, 32, 256, 4, 6),
    _tma(16, 64, 128, 4, 4),
    _tma(16, 64, 128, 4, 6),
    _tma(16, 64, 256, 4, 4),
    _tma(32, 16, 256, 4, 4),
    _tma(32, 32, 256, 4, 4),
    _tma(32, 64, 128, 4, 4),
    _tma(64, 16, 256, 4, 4),
    _tma(64, 32, 128, 4, 5),
    _tma(64, 32, 256, 4, 4),
    _tma(16, 64, 128, 4, 6, swap=True),
    _tma(16, 64, 256, 4, 4, swap=True),
    _tma(16, 128, 64, 4, 6, swap=True),
    _tma(16, 128, 128, 4, 4, swap=True),
    _tma(32, 64, 128, 4, 6, swap=True),
    _tma(32, 64, 256, 4, 4, swap=True),
    _tma(32, 128, 128, 4, 4, swap=True),
    _tma(64, 64, 128, 4, 6, swap=True),
    _tma(64, 128, 128, 4, 4, swap=True),
)

DECODE = _ONE_TILE + tuple(replace(schedule, overlap=True) for schedule in _ONE_TILE)
"""For at most 64 rows: bound by reading the weight once."""

POINTER = (
    _pointer(16, 16, 256, 2, 4),
    _pointer(16, 32, 128, 4, 5),
    _pointer(16, 32, 256, 4, 4),
    _pointer(16, 64, 128, 4, 4),
    _pointer(32, 64, 128, 4, 4),
    _pointer(64, 32, 128, 4, 4),
    _pointer(64, 64, 64, 4, 4),
    _pointer(64, 128, 64, 4, 3),
    _pointer(128, 128, 32, 8, 4),
    _pointer(128, 128, 64, 8, 3),
)
"""For any GPU from sm_80, and for operands that no descriptor can describe."""

POINTER_FP32 = (
    _pointer(16, 32, FP32_STEP, 4, 3),
    _pointer(16, 64, FP32_STEP, 4, 3),
    _pointer(32, 64, FP32_STEP, 4, 3),
    _pointer(64, 64, FP32_STEP, 8, 3),
    _pointer(128, 64, FP32_STEP, 8, 3),
)
"""fp32 has no exact matrix unit: fused multiply-adds on the general cores, a step at a time."""

QKV = (
    _pointer(16, 16, 256, 2, 4),
    _pointer(16, 32, 128, 4, 5),
    _pointer(16, 64, 64, 4, 5),
    _pointer(32, 32, 128, 4, 4),
    _pointer(64, 32, 64, 4, 4),
    _pointer(64, 32, 128, 4, 3),
    _pointer(64, 64, 64, 4, 3),
)
"""For `linear_triton.qkv_fwd`."""

GATE_UP = (
    _tma(16, 16, 256, 4, 4),
    _tma(16, 32, 128, 4, 5),
    _tma(16, 32, 256, 4, 3),
    _tma(16, 64, 128, 4, 4),
    _tma(32, 32, 128, 4, 5),
    _tma(64, 32, 128, 4, 4),
    _tma(64, 64, 64, 4, 5),
    _tma(16, 64, 128, 4, 5, swap=True),
    _tma(32, 64, 128, 4, 5, swap=True),
    _tma(64, 64, 128, 4, 4, swap=True),
    _pointer(16, 64, 64, 4, 5),
    _pointer(32, 32, 128, 4, 4),
    _pointer(64, 32, 64, 4, 4),
)
"""For `linear_triton.gate_up_glu_fwd`, whose programs hold two weight tiles a stage."""

FUSED_ROWS = 64
"""The most rows for which one launch of three products, or of two and the GLU, is chosen."""

CANDIDATES = LARGE + MEDIUM + DECODE + POINTER
"""Every schedule for bf16 and fp16."""

MAX_BUCKET = 16384
"""The largest bucket of row counts; larger products share it."""


@dataclass(frozen=True)
class Entry:
    """A measured winner: the weight's shape and the schedule that was fastest for it."""

    n: int
    k: int
    schedule: Schedule
    library: bool = False
    """Whether the vendor library was faster still, where it is certified to give these bytes."""


def _table() -> dict[tuple[str, int], list[Entry]]:
    by_name = {schedule.name: schedule for schedule in CANDIDATES}
    table: dict[tuple[str, int], list[Entry]] = {}
    for layout, rows, n, k, name, library in MEASURED:
        table.setdefault((layout, rows), []).append(Entry(n, k, by_name[name], library))
    return table


TABLE = _table()
"""(layout, bucket of rows) -> measured shapes."""


def bucket(m: int) -> int:
    """The power of two that a number of rows is rounded up to, at most `MAX_BUCKET`."""
    return min(1 << max(m - 1, 0).bit_length(), MAX_BUCKET)


@cache
def pick(m: int, n: int, k: int, dtype: torch.dtype, layout: str, tma: bool) -> Schedule:
    """The schedule for [m, k] times a weight that gives n columns.

    Args:
        layout: "nt" for a weight [n, k], "nn" for [k, n].
        tma: whether device and operands allow copies by descriptor.
    """
    if dtype == torch.float32:
        return _pick_fp32(m, n)
    if not tma:
        return _pick_pointer(m, n)
    entry = _nearest(m, n, k, layout)
    return entry.schedule if entry is not None else _pick_tma(m, n, k)


@cache
def prefers_library(m: int, n: int, k: int, dtype: torch.dtype, layout: str) -> bool:
    """Whether the vendor library is the faster schedule, should it be certified.

    For layout "tn" (dW, see `cublaslt.outer_from_zero`) m is the number of tokens.
    """
    if m < 2 or dtype == torch.float32:
        return False
    if layout == "tn":
        return m >= 2048
    entry = _nearest(m, n, k, layout)
    return entry.library if entry is not None else m >= 512


def _nearest(m: int, n: int, k: int, layout: str) -> Entry | None:
    measured = layout if any(kind == layout for kind, _ in TABLE) else "nt"
    # Between measured numbers of rows the next larger one serves.
    rows = min((r for kind, r in TABLE if kind == measured and r >= bucket(m)), default=0)
    entries = TABLE.get((measured, rows), ())
    return min(
        entries,
        key=lambda e: (log2(e.n) - log2(n)) ** 2 + (log2(e.k) - log2(k)) ** 2,
        default=None,
    )


def _pick_tma(m: int, n: int, k: int) -> Schedule:
    if m <= 64:
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        if n >= 8192:
            return _tma(block_m, 64, 128, 4, 4)
        if n >= 4096 or block_m == 64:
            return _tma(block_m, 32, 256, 4, 4)
        return _tma(block_m, 16, 256, 4, 6)
    if m <= 512:
        tiles = -(-m // 64) * -(-n // 64)
        if tiles <= 264:
            return _tma(64, 64, 128, 4, 5)
        return _tma(64, 128, 64, 4, 4) if tiles <= 528 else _tma(128, 128, 64, 8, 4)
    if -(-m // 128) * -(-n // 256) < 100:
        return _tma(128, 128, 64, 8, 4, persistent=True)
    return _tma(128, 256, 64, 8, 4, persistent=True, split_epilogue=True)


def _pick_pointer(m: int, n: int) -> Schedule:
    if m <= 16:
        return _pointer(16, 64, 128, 4, 4) if n >= 8192 else _pointer(16, 32, 256, 4, 4)
    if m <= 32:
        return _pointer(32, 64, 128, 4, 4)
    if m <= 256:
        return _pointer(64, 64, 64, 4, 4)
    return _pointer(128, 128, 32, 8, 4)


def _pick_fp32(m: int, n: int) -> Schedule:
    if m <= 16:
        return _pointer(16, 32, FP32_STEP, 4, 3)
    return _pointer(64 if m <= 512 else 128, 64, FP32_STEP, 8, 3)


@cache
def pick_qkv(m: int, n: int, k: int, dtype: torch.dtype) -> Schedule:
    """The schedule of `linear_triton.qkv_fwd` for m rows and n columns of all three weights."""
    if dtype == torch.float32:
        return _pointer(16 if m <= 16 else 32, 32, FP32_STEP, 4, 3)
    if m <= 16:
        return _pointer(16, 32, 128, 4, 5)
    return _pointer(32, 32, 128, 4, 4) if m <= 32 else _pointer(64, 32, 64, 4, 4)


@cache
def pick_gate_up(m: int, n: int, k: int, dtype: torch.dtype, tma: bool) -> Schedule:
    """The schedule of `linear_triton.gate_up_glu_fwd` for m rows and n columns of each weight."""
    if dtype == torch.float32:
        return _pointer(16 if m <= 16 else 32, 32, FP32_STEP, 4, 3)
    if not tma:
        if m <= 16:
            return _pointer(16, 64, 64, 4, 5)
        return _pointer(32, 32, 128, 4, 4) if m <= 32 else _pointer(64, 32, 64, 4, 4)
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    if block_m == 16 and n < 4096:
        return _tma(16, 16, 256, 4, 4)
    return _tma(block_m, 32, 128, 4, 4 if block_m == 64 else 5)
