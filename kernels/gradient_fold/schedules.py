"""Schedules of the gradient fold of outer products on a GPU, and which one a shape gets.

All schedules give the same bits. A schedule may load any multiple of 16 tokens at once, since one
instruction takes 16, and may hold any part of the matrix. It must not split the tokens. So few
tiles leave multiprocessors idle, and `pick` chooses mainly by how the tiles fill the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rl_consistency.kernels.core.matrix_step import FP32_STEP
from rl_consistency.kernels.core.tuned_schedules import (
    chosen,
    picked_once,
    schedule_name,
    work_name,
)

REGISTERS = 65536
"""Registers of one multiprocessor, from sm_80 on."""

MAX_REGISTERS = 255
"""Registers of one thread."""

Kind = Literal["tma", "pointer"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How `fold_outer` cuts the gradient into tiles; each is continued over all tokens."""

    kind: Kind
    """`tma` copies operands by descriptor (sm_90); `pointer` takes any operand on any GPU."""
    block_n: int
    """Output features (columns of dy) in a tile."""
    block_k: int
    """Input features (columns of x) in a tile."""
    block_t: int
    """Tokens loaded at once; a multiple of 16."""
    warps: int
    stages: int
    """Operand tiles in flight."""
    extra_n: int = 0
    """Output features of a second accumulator below the first, `tma` only. A tile of 192 is
    128 + 64, since a part must be a power of two."""
    extra_k: int = 0
    """Input features of a second accumulator beside the first; not together with `extra_n`."""
    persistent: bool = False
    """Programs that fit the GPU at once walk over all tiles, instead of one program per tile."""
    resident: int = 1
    """Programs that share one multiprocessor."""
    rate: float = 1.0
    """Measured relative speed of the loop; only `pick` reads it."""

    @property
    def tile(self) -> tuple[int, int]:
        """Output features and input features of a tile."""
        return self.block_n + self.extra_n, self.block_k + self.extra_k

    @property
    def registers(self) -> int | None:
        """Most registers per thread for `resident` programs to fit; None for no limit."""
        share = REGISTERS // (self.resident * self.warps * 32) // 8 * 8
        return share if self.resident > 1 and share < MAX_REGISTERS else None

    def tiles(self, n: int, k: int) -> int:
        """Tiles of an [n, k] gradient."""
        tile_n, tile_k = self.tile
        return -(-n // tile_n) * -(-k // tile_k)


def _tma(n: int, k: int, t: int, warps: int, stages: int, **options) -> Schedule:
    return Schedule(
        kind="tma", block_n=n, block_k=k, block_t=t, warps=warps, stages=stages, **options
    )


def _pointer(n: int, k: int, t: int, warps: int, stages: int, **options) -> Schedule:
    return Schedule(
        kind="pointer", block_n=n, block_k=k, block_t=t, warps=warps, stages=stages, **options
    )


TMA = (
    _tma(256, 128, 64, 8, 3, rate=0.9),
    _tma(128, 256, 64, 8, 3, persistent=True),
    _tma(128, 128, 64, 4, 3, resident=2, rate=0.9),
    _tma(64, 128, 64, 4, 4, resident=2, rate=0.65),
    # A taller tile reads less from the L2 cache per product, but uses all registers.
    _tma(128, 256, 64, 8, 3, extra_n=64, persistent=True, rate=1.02),
    # These cut a 3072 by 1024 matrix or its transpose into 128 tiles, one per multiprocessor.
    _tma(128, 128, 64, 8, 4, extra_n=64, persistent=True, rate=0.88),
    _tma(128, 128, 64, 8, 4, extra_k=64, persistent=True, rate=0.88),
)

POINTER = (
    _pointer(128, 128, 32, 8, 3, rate=0.6),
    _pointer(64, 64, 32, 4, 4, resident=2, rate=0.4),
    _pointer(32, 32, 16, 4, 2, resident=4, rate=0.2),
)

WIDE = (
    _pointer(64, 64, FP32_STEP, 4, 2, resident=2, rate=0.2),
    _pointer(32, 32, FP32_STEP, 4, 2, resident=4, rate=0.1),
)
"""For fp32 operands: small tiles of fused multiply-adds, as matrix units have no IEEE fp32."""

OVERHEAD_TOKENS = 512
"""The cost of launching, loading and storing a tile, in tokens of its loop."""


def candidates(dtype: torch.dtype, *, tma: bool) -> tuple[Schedule, ...]:
    """All schedules for a dtype; `tma` says whether device and operands admit descriptors."""
    if dtype == torch.float32:
        return WIDE
    return TMA + POINTER if tma else POINTER


def fold_work(tokens: int, n: int, k: int, dtype: torch.dtype, *, tma: bool) -> str:
    """The work of `pick`, as `tune` names it."""
    kind = "tma" if tma and dtype != torch.float32 else "pointer"
    return work_name("fold", dtype, kind, f"n{n}", f"k{k}", rows=tokens)


@picked_once
def pick(
    tokens: int, n: int, k: int, dtype: torch.dtype, *, tma: bool, processors: int,
    device: torch.device | None = None,
) -> Schedule:  # fmt: skip
    """The schedule expected to be the fastest for an [n, k] gradient over `tokens`: what `tune`
    found on the device, else what costs least by the rule below."""
    own = {schedule_name(s): s for s in candidates(dtype, tma=tma)}
    if (tuned := chosen(device, fold_work(tokens, n, k, dtype, tma=tma), own)) is not None:
        return tuned

    def cost(schedule: Schedule) -> float:
        tile_n, tile_k = schedule.tile
        tiles_of_the_busiest = -(-schedule.tiles(n, k) // processors)
        return tiles_of_the_busiest * tile_n * tile_k * (tokens / schedule.rate + OVERHEAD_TOKENS)

    return min(candidates(dtype, tma=tma), key=cost)
