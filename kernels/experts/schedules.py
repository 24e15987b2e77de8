"""Schedules of the experts on CUDA, and which one a call gets; all give the same bytes.

The host does not know how many rows an expert has. So a pick goes by the number of pairs and of
experts, as if routing were even. What `tune` found on a device goes first.

Routing is not even. So a schedule of a product has two tiles, and the device knows which one to
take: an expert's rows are cut into tall tiles, and rows left for a tile that fit a short one take
that. An expert of many rows then reads its weights once for each tall tile. An expert whose rows
fit a short tile multiplies no more filler than that has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2
from rl_consistency.kernels.core.reduction_order import FP32_STEP
from rl_consistency.kernels.gradient_fold.schedules import POINTER as NARROW_FOLDS
from rl_consistency.kernels.gradient_fold.schedules import TMA as DENSE_FOLDS
from rl_consistency.kernels.gradient_fold.schedules import WIDE as FOLDS_FP32
from rl_consistency.kernels.gradient_fold.schedules import FoldSchedule, expected_us
from rl_consistency.kernels.matmul.schedules import Schedule

Product = Literal["gate_up", "nt", "nn"]
"""Both products and the gated activation; a product with [E, n, k]; one with [E, k, n]."""


@dataclass(frozen=True)
class ProductSchedule:
    """How a product of experts is cut into programs; it changes no bit."""

    short: Schedule
    """Schedule of a tile with at most `short.block_m` rows."""
    tall: Schedule
    """Schedule of the other tiles; with as many warps, of the same kind, and with at least as many
    columns. It is `short` where all tiles are alike."""
    mean: int = 0
    """Rows of an expert at even routing, up to which the rule picks it."""

    @classmethod
    def named(cls, name: str, mean: int = 0) -> ProductSchedule:
        """The schedule of a name: that of a tile, or those of a short and a tall one with a `+`."""
        tiles = [Schedule.named(tile) for tile in name.split("+")]
        return cls(tiles[0], tiles[-1], mean)

    @property
    def name(self) -> str:
        """What `named` reads."""
        return "+".join(dict.fromkeys((self.short.name, self.tall.name)))

    @property
    def kind(self) -> str:
        """Kind of both tiles."""
        return self.short.kind

    def tiles(self, rows: int) -> tuple[Schedule, Schedule]:
        """Both tiles in a call of so many rows. No expert has more rows than the call, so one of
        few rows has no tall tile."""
        return self.short, self.tall if rows > self.short.block_m else self.short


def _table(means: dict[str, int]) -> tuple[ProductSchedule, ...]:
    return tuple(ProductSchedule.named(name, mean) for name, mean in means.items())


PRODUCTS = _table(
    {
        "pointer-16x64x128-w4-s4+pointer-64x128x64-w4-s4": 64,
        "pointer-64x128x64-w4-s4": 96,
        "pointer-128x128x64-w8-s3": 128,
    }
)
"""Schedules for bf16 and fp16, with the `mean` of each; the last one is also for more rows."""

PRODUCTS_TMA = _table(
    {
        "tma-16x64x128-w4-s5+tma-64x128x64-w4-s4": 64,
        "tma-64x128x64-w4-s4": 96,
        "tma-128x128x64-w8-s4": 128,
    }
)
"""`PRODUCTS` with copies by descriptor: of the weights, and of rows that stand by pair. On an H200,
short tiles of 32 rows and tall ones of 128 were slower in nearly every routing."""

GATE_UP = _table(
    {
        "pointer-16x32x128-w4-s4+pointer-64x64x64-w4-s4": 64,
        "pointer-64x64x64-w4-s4": 96,
        "pointer-128x64x64-w8-s3": 128,
    }
)
"""Schedules as in `PRODUCTS`, for gate and up: two weight tiles per stage."""

GATE_UP_TMA = _table(
    {
        "tma-16x32x128-w4-s5+tma-64x64x64-w4-s4": 64,
        "tma-64x64x64-w4-s4": 96,
        "tma-128x128x64-w8-s3": 128,
    }
)
"""Schedules as in `PRODUCTS_TMA`, for gate and up."""

PRODUCTS_FP32 = _table(
    {
        f"pointer-16x32x{FP32_STEP}-w4-s3+pointer-64x32x{FP32_STEP}-w4-s3": 16,
        f"pointer-32x32x{FP32_STEP}-w4-s3+pointer-64x32x{FP32_STEP}-w4-s3": 32,
        f"pointer-64x32x{FP32_STEP}-w4-s3": 64,
    }
)
"""Schedules of products, and of gate and up, in fp32."""


BLOCK_STEPS = 64
"""Steps of a run that a program loads at once, at most."""

FOLDS_TMA = tuple(s for s in DENSE_FOLDS if s.block_t <= BLOCK_STEPS and s.tile != (192, 256))
"""Schedules for gradients of bf16 and fp16 operands whose rows are copied out in the order of the
runs. The largest tile would not fit the registers."""

FOLDS = (
    FoldSchedule(kind="pointer", block_n=128, block_k=128, block_t=64, warps=8, stages=4),
    FoldSchedule(kind="pointer", block_n=128, block_k=64, block_t=64, warps=4, stages=4),
    *NARROW_FOLDS,
)
"""Schedules for operands read where they lie."""


@dataclass(frozen=True)
class RowSchedule:
    """How programs take rows; it changes no bit."""

    block: int
    """Columns of a program; where a program holds a whole row, unused."""
    warps: int


COMBINE = (RowSchedule(512, 2), RowSchedule(1024, 4), RowSchedule(2048, 4), RowSchedule(4096, 8))
PAIR = (RowSchedule(0, 1), RowSchedule(0, 4), RowSchedule(0, 8), RowSchedule(0, 16))
"""Schedules of the row's sum and of a pair's gradient."""

MOST_HELD = 32
"""Columns of a pair that a thread holds. One warp was the fastest where this lets it; the compiler
takes minutes for many times as many."""

COUNTED = 4096
"""Elements of the table of rows and experts that a program of `pairs_triton` holds."""

FEW_ROWS = 256
"""Rows up to which a row's sum is shared by several programs."""


LIBRARY_PAIRS = 256
"""Pairs of each expert from which the library is preferred. With fewer, reading the weights takes
most of the time, and our own products save the copy of x and the pass over gate and up."""


def block_experts(experts: int) -> int:
    """The next power of two; all experts stand in one vector."""
    return max(next_power_of_2(experts), 2)


def block_rows(experts: int) -> int:
    """Rows whose pairs one program counts."""
    return min(max(COUNTED // block_experts(experts), 16), 64)


def most_tiles(pairs: int, rows: int, experts: int, block: int) -> int:
    """Tiles of `block` pairs for every routing of so many rows: each expert may have a tile that is
    not full, and in a call of few rows has no other one."""
    full = pairs // block if rows > block else 0
    return min(pairs, full + experts)


def product_candidates(
    product: Product, dtype: torch.dtype, *, tma: bool
) -> tuple[ProductSchedule, ...]:
    """All schedules of a product; `tma`: device and weights allow copies by descriptor."""
    if dtype == torch.float32:
        return PRODUCTS_FP32
    fused = product == "gate_up"
    own, described = (GATE_UP, GATE_UP_TMA) if fused else (PRODUCTS, PRODUCTS_TMA)
    return own + described if tma else own


def product_work(
    product: Product, dtype: torch.dtype, tma: bool, pairs: int, experts: int, n: int, k: int
) -> str:
    """The work of `pick_product`, as `tune` names it."""
    kind = "tma" if tma and dtype != torch.float32 else "pointer"
    return work_name("experts", product, dtype, kind, f"e{experts}", f"n{n}", f"k{k}", rows=pairs)


def fold_work(dtype: torch.dtype, tma: bool, pairs: int, experts: int, n: int, k: int) -> str:
    """The work of `pick_fold`."""
    kind = "tma" if tma and dtype != torch.float32 else "pointer"
    return work_name("experts_fold", dtype, kind, f"e{experts}", f"n{n}", f"k{k}", rows=pairs)


@picked_once
def pick_product(
    product: Product, pairs: int, experts: int, n: int, k: int, dtype: torch.dtype, tma: bool,
    device: torch.device | None = None,
) -> ProductSchedule:  # fmt: skip
    """The schedule for so many pairs and expert weights of n columns; `tma` as above."""
    own = product_candidates(product, dtype, tma=tma)
    work = product_work(product, dtype, tma, pairs, experts, n, k)
    if (found := choose(device, work, own)) is not None:
        return found
    own = tuple(s for s in own if s.kind == "tma") or own
    mean = cdiv(pairs, experts)
    return next((s for s in own if s.mean >= mean), own[-1])


def fold_candidates(dtype: torch.dtype, *, tma: bool) -> tuple[FoldSchedule, ...]:
    """All schedules of the fold over runs; `tma`: device and widths allow copies by descriptor."""
    if dtype == torch.float32:
        return FOLDS_FP32
    return FOLDS_TMA + FOLDS if tma else FOLDS


@picked_once
def pick_fold(
    pairs: int, experts: int, n: int, k: int, dtype: torch.dtype, *, tma: bool, processors: int,
    device: torch.device | None = None,
) -> FoldSchedule:  # fmt: skip
    """The schedule for an [n, k] gradient of each expert: the one by descriptor that is expected
    to be the fastest with even routing, or the first one by pointers whose tile fits."""
    own = fold_candidates(dtype, tma=tma)
    work = fold_work(dtype, tma, pairs, experts, n, k)
    if (found := choose(device, work, own)) is not None:
        return found
    if copying := [s for s in own if s.kind == "tma"]:
        each = cdiv(pairs, experts)
        return min(copying, key=lambda s: expected_us(s, each, n, k, processors, experts))
    fitting = [s for s in own if s.block_n <= n and s.block_k <= k]
    return fitting[0] if fitting else own[-1]


def pick_combine(rows: int, hidden: int) -> RowSchedule:
    """The schedule of a row's sum."""
    if rows <= FEW_ROWS:
        return COMBINE[0]
    return COMBINE[1] if hidden <= 1024 else COMBINE[2]


def pair_candidates(width: int) -> tuple[RowSchedule, ...]:
    """Schedules of a pair's gradient whose row is `width` wide."""
    block = next_power_of_2(width)
    return tuple(s for s in PAIR if block <= MOST_HELD * 32 * s.warps) or PAIR[-1:]


def pick_pair(width: int) -> RowSchedule:
    """The schedule of a pair's gradient: as few warps as may be, since they sum across them."""
    return pair_candidates(width)[0]
