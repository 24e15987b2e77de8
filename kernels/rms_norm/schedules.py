"""Schedules of RMSNorm on CUDA, and which one a row width gets.

All schedules give the same bytes, which a test shows for `candidates`. The tables hold the fastest
ones on an H200, as measured there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.launch import next_power_of_2

MAX_WIDTH = 16384
"""Widest row of one program. The backward pass spills registers above 8192 (fp32: from 8192 on)."""

CHUNK_TOKENS = 2
"""Tokens whose rows one tree adds before the step's sum continues; part of the order."""

MIN_BLOCK = 8
"""Elements in a group of `row_tree`."""

SCRATCH_BYTES = 32 * 1024
"""Upper bound of the shared memory in which warps exchange sums."""


@dataclass(frozen=True)
class NormSchedule:
    """How programs share the rows; it changes no bit."""

    warps: int
    rows: int = 1
    """Rows that a forward program holds at once."""
    split: int = 1
    """Parts in which a backward program takes the rows of a chunk; a power of two."""
    stages: int = 1
    """Chunks that a backward program loads ahead into shared memory; 1 loads into registers."""


FORWARD: dict[int, NormSchedule] = {
    64: NormSchedule(4, rows=32),
    128: NormSchedule(4, rows=32),
    256: NormSchedule(4, rows=16),
    512: NormSchedule(4, rows=8),
    1024: NormSchedule(1),
    2048: NormSchedule(2),
    4096: NormSchedule(4),
    8192: NormSchedule(8),
    16384: NormSchedule(16),
}
"""Row width, rounded up to a power of two -> forward schedule."""

BACKWARD: dict[int, NormSchedule] = {
    64: NormSchedule(4),
    128: NormSchedule(4),
    256: NormSchedule(8),
    512: NormSchedule(2),
    1024: NormSchedule(4, stages=3),
    2048: NormSchedule(4, stages=3),
    4096: NormSchedule(4, split=2, stages=3),
    8192: NormSchedule(16, split=2),
    16384: NormSchedule(16, split=2),
}
"""Row width, rounded up to a power of two -> schedule of the wide kernel of the backward pass."""


@dataclass(frozen=True)
class NarrowSchedule:
    """How the narrow backward kernel goes through its step; it changes no bit."""

    rows: int
    """Rows of each chunk that a program holds at once; a power of two."""
    loops: int
    """Turns in which a program takes all rows; a power of two. The parts of a turn are unrolled."""
    registers: int
    """Most registers of a thread."""


NARROW = NarrowSchedule(rows=4, loops=4, registers=128)
"""Schedule for q/k-norm; measured with 8 and 16 heads of 128 elements."""

NARROW_WIDTH = 256
"""Widest row of the narrow kernel."""


def block_width(width: int) -> int:
    """Columns that a program holds for rows of `width`; ValueError above `MAX_WIDTH`."""
    if width > MAX_WIDTH:
        raise ValueError(
            f"rms_norm: rows of {width} elements on a GPU; at most {MAX_WIDTH} fit one program. "
            "Run this model on the CPU."
        )
    return max(next_power_of_2(width), MIN_BLOCK)


def chunk_rows(rows_per_token: int) -> int:
    """Rows of a backward chunk, filled up to a power of two."""
    return next_power_of_2(CHUNK_TOKENS * rows_per_token)


def candidates(width: int, rows_per_token: int | None = None) -> list[NormSchedule]:
    """Schedules worth timing: of the wide backward kernel, or of the forward pass if
    `rows_per_token` is None."""
    block = block_width(width)
    if rows_per_token is None:
        tiles = (1, 2) if block >= 1024 else (2048 // block, 4096 // block)
        return [
            NormSchedule(warps, rows=rows)
            for rows in tiles
            for warps in (1, 2, 4, 8, 16)
            if 8 <= rows * block // (32 * warps) <= 128
        ]
    held = chunk_rows(rows_per_token) * block
    return [
        NormSchedule(warps, split=split, stages=stages)
        for split in (1, 2)
        for warps in (1, 2, 4, 8, 16)
        for stages in (1, 2, 3)
        if 16 <= held // (32 * warps * split) <= 64 or (warps == 1 and held < 512 * split)
    ]


def norm_work(
    direction: str, dtype: torch.dtype, adds: bool, width: int, rows_per_token: int, rows: int
) -> str:
    """The work of a pick, as `tune` names it; `direction` is "forward" or "backward", `adds` says
    whether a residual, or its gradient, is added."""
    kind = "add" if adds else "plain"
    sizes = f"w{width}", f"h{rows_per_token}"
    return work_name("rms_norm", direction, dtype, kind, *sizes, rows=rows)


@picked_once
def pick_forward(
    width: int, rows: int = 0, dtype: torch.dtype | None = None, adds: bool = False,
    device: torch.device | None = None,
) -> NormSchedule:  # fmt: skip
    """The forward schedule of a row width; with a device, the one that `tune` found for so many
    rows of a dtype."""
    rule = FORWARD[max(block_width(width), min(FORWARD))]
    if dtype is None:
        return rule
    work = norm_work("forward", dtype, adds, width, 1, rows)
    return choose(device, work, (rule, *candidates(width))) or rule


@picked_once
def pick_backward(
    width: int, rows_per_token: int, rows: int = 0, dtype: torch.dtype | None = None,
    adds: bool = False, device: torch.device | None = None,
) -> NormSchedule:  # fmt: skip
    """The wide kernel's schedule of a row width, more heads taking more warps; with a device, the
    one that `tune` found for so many rows of a dtype."""
    block = block_width(width)
    schedule = BACKWARD[max(block, min(BACKWARD))]
    held = chunk_rows(rows_per_token) * block // schedule.split
    warps = schedule.warps
    while held > 32 * 32 * warps and warps < 16:
        warps *= 2
    rule = replace(schedule, warps=warps)
    if dtype is None:
        return rule
    work = norm_work("backward", dtype, adds, width, rows_per_token, rows)
    return choose(device, work, (rule, *candidates(width, rows_per_token))) or rule
