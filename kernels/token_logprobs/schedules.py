"""Schedules of the fused LM head on CUDA, and which one a call gets.

Every entry gives the same bytes, so a schedule may be chosen by any size, the number of rows
included. A test and `verify` run through the tables and compare.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_consistency.kernels.core.device import has_tma

UNFUSED = -1
"""The schedule that writes a chunk's logits to memory and reads them back."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the LM head's product is cut into programs; neutral to the bits."""

    kind: str
    """"tma": tiles copied by descriptor, sm_90 and later; "pointer": any GPU, any strides."""
    block_m: int
    block_n: int
    """Vocabulary ids of a tile: 128 or 256."""
    block_k: int
    warps: int
    stages: int
    group: int = 8
    """Row tiles that are walked together before the next column tile, for reuse in L2."""
    programs: int = 1
    """Programs of one multiprocessor; of two, one computes while the other reduces its tile."""
    flatten: bool = False
    """Load the next tile's operands while this one is reduced."""

    def __post_init__(self) -> None:
        if self.block_n not in (128, 256) or self.kind not in ("tma", "pointer"):
            raise ValueError(
                f"token_logprobs: schedule {self}; kind is tma or pointer, block_n 128 or 256."
            )


def _tma(block_m: int, block_n: int, warps: int, stages: int, **options: int | bool) -> Schedule:
    return Schedule(
        kind="tma",
        block_m=block_m,
        block_n=block_n,
        block_k=64,
        warps=warps,
        stages=stages,
        **options,  # type: ignore[arg-type]
    )


def _pointer(block_m: int, block_n: int, block_k: int, warps: int, stages: int) -> Schedule:
    return Schedule(
        kind="pointer",
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        warps=warps,
        stages=stages,
    )


# The accumulator is reduced in registers; flattened loops of 128-wide tiles make the compiler wait
# for every MMA before the next, so only 256-wide ones are here.
STATISTICS_SCHEDULES = (
    _tma(128, 256, 8, 4, group=16, flatten=True),
    _tma(128, 256, 8, 4, flatten=True),
    _tma(128, 256, 8, 4, group=16),
    _tma(128, 256, 8, 4),
    _tma(256, 128, 8, 4),
    _tma(128, 128, 4, 3, programs=2),
    _tma(128, 128, 4, 3, programs=2, group=16),
    _tma(64, 256, 4, 2, programs=2),
    _pointer(128, 128, 32, 8, 3),
    _pointer(16, 256, 64, 4, 3),
    _pointer(64, 128, 64, 4, 3),
    _pointer(32, 128, 32, 4, 3),
)

GRADIENT_SCHEDULES = (
    _tma(128, 256, 8, 3, flatten=True),
    _tma(128, 256, 8, 3),
    _tma(128, 256, 8, 4),
    _tma(128, 256, 8, 3, group=16),
    _tma(128, 256, 8, 3, group=16, flatten=True),
    _tma(256, 128, 8, 3),
    _tma(128, 128, 4, 3, programs=2),
    _tma(128, 128, 4, 3, programs=2, group=16),
    _tma(64, 256, 4, 2, programs=2),
    _pointer(128, 128, 32, 8, 3),
    _pointer(16, 256, 64, 4, 3),
    _pointer(64, 128, 64, 4, 3),
    _pointer(32, 128, 32, 4, 3),
)

# The first TMA and the first pointer entry of a table are the ones in use; fp32 products run on the
# ordinary units, where reading the logits back costs nothing beside them.


def takes_tma(*operands: Tensor) -> bool:
    """Whether all operands can be copied by tile descriptors."""
    return has_tma(operands[0].device) and all(
        t.data_ptr() % 16 == 0 and t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0
        for t in operands
    )


def pick(table: tuple[Schedule, ...], hidden: Tensor, weight: Tensor) -> int:
    """Index of the schedule for these operands, or `UNFUSED`."""
    if hidden.dtype == torch.float32:
        return UNFUSED
    kind = "tma" if takes_tma(hidden, weight) else "pointer"
    return next(i for i, schedule in enumerate(table) if schedule.kind == kind)
