"""Schedules of the matmul order on CUDA, and which one a shape gets.

All schedules give the same bytes, so `pick` may choose by any size, even by the number of rows. A
test and `verify` run and compare all of them. Each is the choice for some shape. What `tune` found
on a device goes before the tables here; without a device a pick is that of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from operator import itemgetter

import torch

from rl_consistency.kernels.core.cache.tuned_schedules import chosen, picked_once, work_name
from rl_consistency.kernels.core.matrix_step import FP32_STEP
from rl_consistency.kernels.matmul.cost import library_is_faster, schedule_us
from rl_consistency.kernels.matmul.table import MEASURED

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


LARGE = table_of(
    "tma-128x256x64-w8-s4-persistent-split",
    "tma-128x256x64-w8-s3-persistent-split",
    "tma-128x128x64-w8-s4-persistent",
    "tma-128x128x64-w4-s4-persistent",
)
"""Schedules for many rows: bound by the matrix units."""

MEDIUM = table_of(
    "tma-128x128x128-w8-s3",
    "tma-128x128x64-w4-s3",
    "tma-64x128x64-w4-s4",
    "tma-64x128x128-w4-s4",
    "tma-64x256x64-w4-s4",
    "tma-64x64x128-w4-s5",
)
"""Schedules for a few hundred rows: tiles small enough to keep all multiprocessors busy."""

DECODE = table_of(
    "tma-16x32x256-w4-s6",
    "tma-16x32x256-w4-s6-overlap",
    "tma-16x64x128-w4-s4",
    "tma-16x64x128-w4-s4-overlap",
    "tma-16x64x128-w4-s6-swap-overlap",
    "tma-16x64x256-w4-s4-swap",
    "tma-16x64x256-w4-s4-swap-overlap",
    "tma-16x128x64-w4-s6-swap-overlap",
    "tma-16x128x128-w4-s4-swap-overlap",
    "tma-32x64x128-w4-s4",
    "tma-32x64x128-w4-s6-swap",
    "tma-32x64x128-w4-s6-swap-overlap",
    "tma-32x64x256-w4-s4-swap",
    "tma-32x64x256-w4-s4-swap-overlap",
    "tma-32x128x128-w4-s4-swap",
    "tma-64x16x256-w4-s4-overlap",
    "tma-64x32x256-w4-s4-overlap",
    "tma-64x64x128-w4-s6-swap",
    "tma-64x64x128-w4-s6-swap-overlap",
    "tma-64x128x128-w4-s4-swap",
    "tma-64x128x128-w4-s4-swap-overlap",
)
"""Schedules for few rows: bound by reading the weight once."""

POINTER = table_of(
    "pointer-16x32x256-w4-s4",
    "pointer-16x64x128-w4-s4",
    "pointer-32x64x128-w4-s4",
    "pointer-64x64x64-w4-s4",
    "pointer-128x128x32-w8-s4",
)
"""Schedules for any GPU from sm_80 on, and for operands that no descriptor can address."""

DESCRIBED = LARGE + MEDIUM + DECODE

CANDIDATES = DESCRIBED + POINTER
"""All schedules of `pick` for bf16 and fp16."""

POINTER_FP32 = table_of(
    f"pointer-16x32x{FP32_STEP}-w4-s3",
    f"pointer-64x64x{FP32_STEP}-w8-s3",
    f"pointer-128x64x{FP32_STEP}-w8-s3",
)
"""Schedules for fp32, which no matrix unit multiplies exactly: fused multiply-adds, one step at a
time."""

TRITON_ROWS = 16
"""The most rows for which the vendor library is never preferred: one tile holds them all, so a
schedule reads the weight as fast as memory gives it, and the library needs a certificate first."""

NEAR = 1.06
"""The ratio of sizes up to which a measured shape decides for another. Of shapes within a quarter
of a measured one, the cost picked better than its entry."""

_BY_NAME = {s.name: s for s in (*CANDIDATES, *POINTER_FP32)}


@dataclass(frozen=True)
class Entry:
    """The fastest schedule measured for a weight's shape."""

    n: int
    k: int
    schedule: Schedule
    library: bool = False
    """Whether the vendor library gave the same bytes in less time."""


def _measured() -> dict[tuple[str, int], list[Entry]]:
    table: dict[tuple[str, int], list[Entry]] = {}
    for layout, rows, n, k, name, library in MEASURED:
        table.setdefault((layout, rows), []).append(Entry(n, k, _BY_NAME[name], library))
    return table


TABLE = _measured()
"""(layout, rows) -> measured shapes."""


LIBRARY, TRITON = "library", "triton"
"""Candidates of a `library_work`: who computes the product."""


def product_work(
    layout: str, dtype: torch.dtype, out_dtype: torch.dtype, tma: bool, m: int, n: int, k: int
) -> str:
    """The work of `pick`, as `tune` names it."""
    kind = "tma" if tma else "pointer"
    return work_name("matmul", layout, dtype, out_dtype, kind, f"n{n}", f"k{k}", rows=m)


def library_work(
    layout: str, dtype: torch.dtype, out_dtype: torch.dtype, m: int, n: int, k: int
) -> str:
    """The work of `prefers_library`, whose candidates are `LIBRARY` and `TRITON`."""
    return work_name("library", layout, dtype, out_dtype, f"n{n}", f"k{k}", rows=m)


def candidates(m: int, dtype: torch.dtype, *, tma: bool) -> tuple[Schedule, ...]:
    """Schedules of `pick` worth timing for m rows."""
    if dtype == torch.float32:
        return POINTER_FP32
    if not tma:
        return POINTER
    return tuple(fitting(m))


def by_name(schedules: tuple[Schedule, ...]) -> dict[str, Schedule]:
    """The schedules, as `tune` names its candidates."""
    return {s.name: s for s in schedules}


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
    if (tuned := chosen(device, work, by_name(own))) is not None:
        return tuned
    if fp32:
        return _pick_fp32(m)
    if not tma:
        return _pick_pointer(m, n)
    entry = _near(m, n, k, layout)
    return entry.schedule if entry is not None else _cheapest(m, n, k)


@picked_once
def prefers_library(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str,
    out_dtype: torch.dtype | None = None, device: torch.device | None = None,
) -> bool:  # fmt: skip
    """Whether the vendor library is expected to be faster. For layout "tn" (dW) m counts tokens.

    Only a certificate admits the library, whatever is expected.
    """
    if m <= TRITON_ROWS or dtype == torch.float32:
        return False
    if (tuned := tuned_preference(m, n, k, dtype, layout, out_dtype, device)) is not None:
        return tuned
    if layout == "tn":
        return m >= 2048
    entry = _near(m, n, k, layout)
    if entry is not None:
        return entry.library
    return library_is_faster(m, n, k, expected_us(_cheapest(m, n, k), m, n, k))


def tuned_preference(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str,
    out_dtype: torch.dtype | None = None, device: torch.device | None = None,
) -> bool | None:  # fmt: skip
    """Whether `tune` found the library to be faster; None where it did not measure the work."""
    work = library_work(layout, dtype, out_dtype or dtype, m, n, k)
    return chosen(device, work, {LIBRARY: True, TRITON: False})


def expected_us(schedule: Schedule, m: int, n: int, k: int) -> float:
    """Microseconds that a schedule by descriptor of `CANDIDATES` is expected to take on an H200 for
    [m, k] times [k, n]; KeyError for another schedule."""
    blocks = (schedule.block_m, schedule.block_n, schedule.block_k)
    return schedule_us(schedule.name, blocks, schedule.overlap, m, n, k)


def _near(m: int, n: int, k: int, layout: str) -> Entry | None:
    """The measured shape of which no size differs by more than `NEAR`, None if there is none."""
    rows = min((r for kind, r in TABLE if kind == layout and r >= m), default=0)
    if max(m, TRITON_ROWS) * NEAR < max(rows, TRITON_ROWS) or not rows:
        return None
    distance, entry = min(
        ((max(abs(log2(e.n / n)), abs(log2(e.k / k))), e) for e in TABLE[layout, rows]),
        key=itemgetter(0),
    )
    return entry if distance <= log2(NEAR) else None


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


def _cheapest(m: int, n: int, k: int) -> Schedule:
    return min(fitting(m), key=lambda s: expected_us(s, m, n, k))


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
