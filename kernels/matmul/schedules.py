"""Schedules of the matmul order on CUDA, and which one a shape gets.

All schedules give the same bytes, so `pick` may choose by any size, even by the number of rows. A
test and `verify` run and compare all of them. Each is the choice for some shape: of the findings,
the user's before the shipped ones, else of the expected cost.

The cost: tiles are dealt out to the multiprocessors. The busiest one sets the pace, and its loops
partly hide the way of the operands from memory. The figures are those of an H200: least squares of
the log of expected by measured time, over half of the shapes of
`benchmarks/results/h200_random.json`. The other half judges them, in
tests/kernels/matmul/test_pick_quality.py. On another GPU they may cost speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot

import torch

from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.core.reduction_order import FP32_STEP

ACCUMULATOR_BYTES = 4
"""Bytes of one fp32 element."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How one product is cut into programs; no field is part of the order."""

    kind: str
    """"tma": tiles copied by descriptor, sm_90 and later; "pointer": any GPU, any strides."""
    block_m: int
    """Rows of `a` per tile."""
    block_n: int
    """Columns of the result per tile."""
    block_k: int
    """Elements of K that a program holds at once."""
    warps: int
    stages: int
    persistent: bool = False
    """One program per multiprocessor computes several tiles; its stores overlap the next tile."""
    split: bool = False
    """The tile is stored in two halves, which leaves shared memory for one more stage."""
    swap: bool = False
    """The transposed product is computed, so that few rows of `a` fill a warp-group MMA."""
    overlap: bool = False
    """The program starts before the previous kernel ends, but reads and writes only after it
    (programmatic dependent launch, sm_90)."""

    @classmethod
    def named(cls, name: str) -> Schedule:
        """The schedule of a name: `tma-128x256x64-w8-s4-persistent` gives the kind, the blocks
        M x N x K, warps, stages and flags."""
        kind, blocks, warps, stages, *flags = name.split("-")
        block_m, block_n, block_k = map(int, blocks.split("x"))
        return cls(
            kind=kind,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            warps=int(warps.removeprefix("w")),
            stages=int(stages.removeprefix("s")),
            **dict.fromkeys(flags, True),
        )

    @property
    def name(self) -> str:
        """What `named` reads."""
        blocks = f"{self.block_m}x{self.block_n}x{self.block_k}"
        flags = [f for f in ("persistent", "split", "swap", "overlap") if getattr(self, f)]
        return "-".join([self.kind, blocks, f"w{self.warps}", f"s{self.stages}", *flags])

    def shared_bytes(self, in_bytes: int, out_bytes: int) -> int:
        """Upper bound of a program's shared memory, given the bytes per element."""
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * in_bytes
        stored = self.block_m * self.block_n * out_bytes // (2 if self.split else 1)
        # A program of one tile stores its result where its operands were. But the compiler gives an
        # fp32 accumulator that a descriptor copies memory of its own.
        unchanged = self.kind == "tma" and out_bytes == ACCUMULATOR_BYTES
        shares = not self.persistent and not unchanged
        return (max(operands, stored) if shares else operands + stored) + 1024

    def within(self, limit: int, in_bytes: int, out_bytes: int) -> Schedule:
        """This schedule with as many stages as fit `limit` bytes of shared memory."""
        fitting = self
        while fitting.shared_bytes(in_bytes, out_bytes) > limit and fitting.stages > 1:
            fitting = replace(fitting, stages=fitting.stages - 1)
        return fitting


def table_of(*names: str) -> tuple[Schedule, ...]:
    """The schedules of these names."""
    return tuple(Schedule.named(name) for name in names)


STEP_US = {
    # For many rows: bound by the matrix units.
    "tma-128x256x64-w8-s4-persistent-split": 0.653,
    "tma-128x256x64-w8-s3-persistent-split": 0.655,
    "tma-128x128x64-w8-s4-persistent": 0.364,
    "tma-128x128x64-w4-s4-persistent": 0.354,
    # For a few hundred rows: tiles small enough to keep all multiprocessors busy.
    "tma-128x128x128-w8-s3": 0.777,
    "tma-128x128x64-w4-s3": 0.381,
    "tma-64x128x64-w4-s4": 0.227,
    "tma-64x128x128-w4-s4": 0.419,
    "tma-64x256x64-w4-s4": 0.377,
    "tma-64x64x128-w4-s5": 0.294,
    # For few rows: bound by reading the weight once.
    "tma-16x32x256-w4-s6": 0.430,
    "tma-16x32x256-w4-s6-overlap": 0.445,
    "tma-16x64x128-w4-s4": 0.247,
    "tma-16x64x128-w4-s4-overlap": 0.282,
    "tma-16x64x128-w4-s6-swap-overlap": 0.186,
    "tma-16x64x256-w4-s4-swap": 0.342,
    "tma-16x64x256-w4-s4-swap-overlap": 0.340,
    "tma-16x128x64-w4-s6-swap-overlap": 0.161,
    "tma-16x128x128-w4-s4-swap-overlap": 0.335,
    "tma-32x64x128-w4-s4": 0.306,
    "tma-32x64x128-w4-s6-swap": 0.203,
    "tma-32x64x128-w4-s6-swap-overlap": 0.203,
    "tma-32x64x256-w4-s4-swap": 0.399,
    "tma-32x64x256-w4-s4-swap-overlap": 0.393,
    "tma-32x128x128-w4-s4-swap": 0.361,
    "tma-64x16x256-w4-s4-overlap": 0.400,
    "tma-64x32x256-w4-s4-overlap": 0.470,
    "tma-64x64x128-w4-s6-swap": 0.275,
    "tma-64x64x128-w4-s6-swap-overlap": 0.279,
    "tma-64x128x128-w4-s4-swap": 0.443,
    "tma-64x128x128-w4-s4-swap-overlap": 0.447,
}
"""Schedules by descriptor -> microseconds of one step of K in a multiprocessor's tile. Where
several programs share a multiprocessor, a step takes so long for each of them."""

DESCRIBED = table_of(*STEP_US)

POINTER = table_of(
    "pointer-16x32x256-w4-s4",
    "pointer-16x64x128-w4-s4",
    "pointer-32x64x128-w4-s4",
    "pointer-64x64x64-w4-s4",
    "pointer-128x128x32-w8-s4",
)
"""Schedules for any GPU from sm_80 on, and for operands that no descriptor can address."""

CANDIDATES = DESCRIBED + POINTER
"""All schedules of `pick` for bf16 and fp16."""

POINTER_FP32 = table_of(
    f"pointer-16x32x{FP32_STEP}-w4-s3",
    f"pointer-64x64x{FP32_STEP}-w8-s3",
    f"pointer-128x64x{FP32_STEP}-w8-s3",
)
"""Schedules for fp32, which no matrix unit multiplies exactly: fused multiply-adds, one step at a
time."""

_BY_NAME = {s.name: s for s in (*CANDIDATES, *POINTER_FP32)}

PROCESSORS = 132
"""Multiprocessors of an H100 or H200; assumed of every GPU."""

MEMORY = 3.33e6
"""Bytes from memory in a microsecond."""

OPERAND_BYTES = 2
"""Bytes of one element in bf16 and fp16. Products in fp32 are not picked by cost."""

TILE_US = 0.9
"""Filling the pipeline of a tile and storing the result."""

LAUNCH_US, OVERLAPPED_LAUNCH_US = 2.0, 1.3
"""Starting a kernel after the previous one, or while that still runs."""


def product_work(
    layout: str, dtype: torch.dtype, out_dtype: torch.dtype, tma: bool, m: int, n: int, k: int
) -> str:
    """The work of `pick`, as `tune` names it."""
    kind = "tma" if tma else "pointer"
    return work_name("matmul", layout, dtype, out_dtype, kind, f"n{n}", f"k{k}", rows=m)


def candidates(m: int, dtype: torch.dtype, *, tma: bool) -> tuple[Schedule, ...]:
    """Schedules of `pick` worth timing for m rows."""
    if dtype == torch.float32:
        return POINTER_FP32
    if not tma:
        return POINTER
    return tuple(fitting(m))


@picked_once
def pick(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str, tma: bool,
    out_dtype: torch.dtype | None = None, device: torch.device | None = None,
) -> Schedule:  # fmt: skip
    """The schedule for [m, k] times a weight [n, k] (layout "nt") or [k, n] ("nn"); `tma` says
    whether device and operands allow copies by descriptor. `out_dtype` None is `dtype`."""
    fp32 = dtype == torch.float32
    own = POINTER_FP32 if fp32 else CANDIDATES if tma else POINTER
    work = product_work(layout, dtype, out_dtype or dtype, tma and not fp32, m, n, k)
    # Products of all 16-bit dtypes take about as long; those of bf16 were measured and shipped.
    alike = work if fp32 else product_work(layout, torch.bfloat16, torch.bfloat16, tma, m, n, k)
    if (found := choose(device, work, own, alike)) is not None:
        return found
    if fp32:
        return _pick_fp32(m)
    return min(fitting(m), key=lambda s: expected_us(s, m, n, k)) if tma else _pick_pointer(m, n)


def expected_us(schedule: Schedule, m: int, n: int, k: int) -> float:
    """Microseconds that a schedule by descriptor of `CANDIDATES` is expected to take on an H200 for
    [m, k] times [k, n]; KeyError for another schedule."""
    tiles = cdiv(m, schedule.block_m) * cdiv(n, schedule.block_n)
    steps = cdiv(k, schedule.block_k)
    busiest = cdiv(tiles, PROCESSORS) * (steps * STEP_US[schedule.name] + TILE_US)
    launch_us = OVERLAPPED_LAUNCH_US if schedule.overlap else LAUNCH_US
    return launch_us + hypot(busiest, OPERAND_BYTES * (m * k + n * k + m * n) / MEMORY)


def fitting(m: int) -> list[Schedule]:
    """Schedules by descriptor of `CANDIDATES` whose tile is neither mostly empty nor tiny for m
    rows; others are neither timed nor picked by cost.

    A tile is at most four times as high as the rows, 32 always being allowed, and has 4 elements
    for each of up to 1,024 rows.
    """
    return [
        s
        for s in DESCRIBED
        if s.block_m <= max(32, 4 * m) and s.block_m * s.block_n >= 4 * min(m, 1024)
    ]


def _pick_pointer(m: int, n: int) -> Schedule:
    if m <= 16:
        return _BY_NAME["pointer-16x64x128-w4-s4" if n >= 8192 else "pointer-16x32x256-w4-s4"]
    if m <= 32:
        return _BY_NAME["pointer-32x64x128-w4-s4"]
    return _BY_NAME["pointer-64x64x64-w4-s4" if m <= 256 else "pointer-128x128x32-w8-s4"]


def _pick_fp32(m: int) -> Schedule:
    if m <= 16:
        return _BY_NAME[f"pointer-16x32x{FP32_STEP}-w4-s3"]
    return _BY_NAME[f"pointer-{64 if m <= 512 else 128}x64x{FP32_STEP}-w8-s3"]
