"""Schedules of the gradient fold of outer products on a GPU, and which one a shape gets.

All schedules give the same bits. A schedule may load any multiple of 16 tokens at once, since one
instruction takes 16, and may hold any part of the matrix. It must not split the tokens. So few
tiles leave multiprocessors idle, and `pick` chooses mainly by how the tiles fill the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, hypot, inf
from typing import Literal

import torch

from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.core.reduction_order import FP32_STEP

REGISTERS = 65536
"""Registers of one multiprocessor, from sm_80 on."""

MAX_REGISTERS = 255
"""Registers of one thread."""

Kind = Literal["tma", "pointer"]


@dataclass(frozen=True, kw_only=True)
class FoldSchedule:
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
    step_us: float = inf
    """Microseconds of a step of `block_t` tokens on an H200, alone on its multiprocessor. Only
    `pick` reads this and the next field."""
    shared_us: float = 0.0
    """Microseconds of a step per program, where `resident` programs share the multiprocessor."""

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Output features and input features of a tile."""
        return self.block_n + self.extra_n, self.block_k + self.extra_k

    @cached_property
    def name(self) -> str:
        """The name in files and reports: `tma-128x256x64-w8-s3-n64-persistent` is the kind, the
        blocks N x K x tokens, warps, stages, extra output features, and flags."""
        flags = [f"n{self.extra_n}"] * bool(self.extra_n) + [f"k{self.extra_k}"] * bool(
            self.extra_k
        )
        flags += ["persistent"] * self.persistent + [f"r{self.resident}"] * (self.resident > 1)
        blocks = f"{self.block_n}x{self.block_k}x{self.block_t}"
        return "-".join([self.kind, blocks, f"w{self.warps}", f"s{self.stages}", *flags])

    @cached_property
    def registers(self) -> int | None:
        """Most registers per thread for `resident` programs to fit; None for no limit."""
        share = REGISTERS // (self.resident * self.warps * 32) // 8 * 8
        return share if self.resident > 1 and share < MAX_REGISTERS else None

    def tiles(self, n: int, k: int) -> int:
        """Tiles of an [n, k] gradient."""
        tile_n, tile_k = self.tile
        return ceil(n / tile_n) * ceil(k / tile_k)


def _of(kind: Kind, n: int, k: int, t: int, warps: int, stages: int, **options) -> FoldSchedule:
    return FoldSchedule(
        kind=kind, block_n=n, block_k=k, block_t=t, warps=warps, stages=stages, **options
    )


TMA = (
    _of("tma", 256, 128, 64, 8, 3, step_us=0.702),
    _of("tma", 128, 256, 64, 8, 3, persistent=True, step_us=0.653),
    _of("tma", 128, 128, 64, 4, 3, resident=2, step_us=0.423, shared_us=0.403),
    _of("tma", 64, 128, 64, 4, 4, resident=2, step_us=0.261, shared_us=0.273),
    # A taller tile reads less from the L2 cache per product, but uses all registers.
    _of("tma", 128, 256, 64, 8, 3, extra_n=64, persistent=True, step_us=0.973),
    # These cut a 3072 by 1024 matrix or its transpose into 128 tiles, one per multiprocessor.
    _of("tma", 128, 128, 64, 8, 4, extra_n=64, persistent=True, step_us=0.551),
    _of("tma", 128, 128, 64, 8, 4, extra_k=64, persistent=True, step_us=0.548),
    # More tokens in flight, for gradients of so few tiles that each has a multiprocessor of its
    # own, which then waits for operands. Until they are timed, their steps are 1.15 of the same
    # tiles' in `matmul`, as those of 64 by 128 by 64 are.
    _of("tma", 64, 128, 128, 4, 4, step_us=0.48),
    _of("tma", 64, 64, 128, 4, 5, step_us=0.34),
)

POINTER = (
    _of("pointer", 128, 128, 32, 8, 3, step_us=0.258),
    _of("pointer", 64, 64, 32, 4, 4, resident=2, step_us=0.097, shared_us=0.097),
    _of("pointer", 32, 32, 16, 4, 2, resident=4, step_us=0.024, shared_us=0.024),
)

WIDE = (
    _of("pointer", 64, 64, FP32_STEP, 4, 2, resident=2, step_us=0.097, shared_us=0.097),
    _of("pointer", 32, 32, FP32_STEP, 4, 2, resident=4, step_us=0.048, shared_us=0.048),
)
"""Schedules for fp32 operands: small tiles of fused multiply-adds, as matrix units have no IEEE
fp32."""

LAUNCH_US = 1.7
"""Starting the kernel."""

TILE_US, LOAD_US, SHARED_LOAD_US = 2.4, 3.1, 2.3
"""The time of a tile outside its loop: filling the pipeline, and reading and writing 128 by 128
elements of the gradient, alone on a multiprocessor or beside the loops of other programs."""

MEMORY = 3.3e6
"""Bytes from and to memory in a microsecond."""


def candidates(dtype: torch.dtype, *, tma: bool) -> tuple[FoldSchedule, ...]:
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
) -> FoldSchedule:  # fmt: skip
    """The schedule for an [n, k] gradient over `tokens`: the winner on the device, else the one
    expected to be the fastest."""
    own = candidates(dtype, tma=tma)
    work = fold_work(tokens, n, k, dtype, tma=tma)
    if (found := choose(device, work, own)) is not None:
        return found
    # Schedules by pointers were timed against each other only, so their figures cannot tell which
    # of them is faster than one by descriptor.
    copying = [s for s in own if s.kind == "tma"] or own
    return min(copying, key=lambda s: expected_us(s, tokens, n, k, processors))


def expected_us(
    schedule: FoldSchedule, tokens: int, n: int, k: int, processors: int, gradients: int = 1
) -> float:
    """Microseconds for an [n, k] gradient over `tokens`, or for many in one launch.

    The figures are those of an H200: least squares of the log of expected by measured time, over
    half of the shapes of `benchmarks/results/h200_random.json`. The other half judges them, in
    tests/kernels/gradient_fold/test_fold_pick_quality.py. On another GPU they may cost speed.
    """
    of_the_busiest = cdiv(gradients * schedule.tiles(n, k), processors)
    steps = cdiv(tokens, schedule.block_t)
    tile_n, tile_k = schedule.tile
    area = tile_n * tile_k / 128**2
    turns = cdiv(of_the_busiest, schedule.resident)
    busiest = turns * (steps * schedule.step_us + TILE_US + LOAD_US * area)
    if schedule.resident > 1:
        together = of_the_busiest * (steps * schedule.shared_us + SHARED_LOAD_US * area)
        busiest = max(busiest, together)
    moved = gradients * (2 * tokens * (n + k) + 8 * n * k) / MEMORY
    return LAUNCH_US + hypot(busiest, moved)
