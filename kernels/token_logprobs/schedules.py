"""Schedules of the LM head's fused products on CUDA, and which one a call gets.

Every schedule gives the same bytes, so any size may choose one. Tests and `verify` compare all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_consistency.kernels.core.device import has_tma, takes_descriptors
from rl_consistency.kernels.core.findings import choose, work_name

UNFUSED = "unfused"
"""Name in the place of a schedule's: write a chunk's logits to memory and read them back."""


@dataclass(frozen=True)
class HeadSchedule:
    """How the LM head's product is cut into programs; neutral to the bits."""

    kind: str  # "tma": tiles copied by descriptor, sm_90 on; "pointer": any GPU, any strides
    block_m: int
    block_n: int  # vocabulary ids of a tile: 128 or 256
    block_k: int
    warps: int
    stages: int
    group: int = 8  # row tiles walked before the next column tile, for reuse in L2
    programs: int = 1  # per multiprocessor; of two, one computes while the other reduces
    flatten: bool = False  # load the next tile's operands while this one is reduced

    def __post_init__(self) -> None:
        if self.block_n not in (128, 256) or self.kind not in ("tma", "pointer"):
            raise ValueError(
                f"token_logprobs: schedule {self}; kind is tma or pointer, block_n 128 or 256."
            )


# `pick` takes "tma" and "pointer"; the others serve to compare bytes. Only 256-wide tiles are
# flattened: with 128-wide ones the compiler waits for every matrix step before the next.
STATISTICS_SCHEDULES = {
    "tma": HeadSchedule("tma", 128, 256, 64, 8, 4, group=16, flatten=True),
    "tma tall": HeadSchedule("tma", 256, 128, 64, 8, 4),
    "tma pair": HeadSchedule("tma", 128, 128, 64, 4, 3, programs=2),
    "pointer": HeadSchedule("pointer", 128, 128, 32, 8, 3),
    "pointer low": HeadSchedule("pointer", 16, 256, 64, 4, 3),
}
"""Schedules of the forward product, whose accumulator is reduced in registers."""
GRADIENT_SCHEDULES = {
    "tma": HeadSchedule("tma", 128, 256, 64, 8, 3, flatten=True),
    "tma tall": HeadSchedule("tma", 256, 128, 64, 8, 3),
    "tma pair": HeadSchedule("tma", 128, 128, 64, 4, 3, programs=2),
    "pointer": HeadSchedule("pointer", 128, 128, 32, 8, 3),
    "pointer low": HeadSchedule("pointer", 16, 256, 64, 4, 3),
}
"""Schedules of the product that backward turns into logit gradients."""


def head_work(product: str, dtype: torch.dtype, vocabulary: int, width: int, rows: int) -> str:
    """The work of `pick`, as `tune` names it; only descriptor schedules are tuned."""
    return work_name("token_logprobs", product, dtype, f"n{vocabulary}", f"k{width}", rows=rows)


def candidates(product: str) -> tuple[str, ...]:
    """Schedules of a product worth timing, on a device and for operands that admit descriptors."""
    table = STATISTICS_SCHEDULES if product == "statistics" else GRADIENT_SCHEDULES
    return tuple(name for name, schedule in table.items() if schedule.kind == "tma")


def pick(hidden: Tensor, weight: Tensor, product: str = "", rows: int = 0) -> str:
    """Name of the schedule for these operands, in both tables; `UNFUSED` for fp32, whose product
    takes so long that reading its logits back costs nothing in comparison.

    With a product, "statistics" or "gradient", the one that `tune` found for so many rows.
    """
    if hidden.dtype == torch.float32:
        return UNFUSED
    if not (has_tma(hidden.device) and takes_descriptors(hidden, weight)):
        return "pointer"
    # A compiler would have to read the winners' file in its trace.
    if not product or torch.compiler.is_compiling():
        return "tma"
    vocabulary, width = weight.shape
    work = head_work(product, hidden.dtype, vocabulary, width, rows)
    return choose(hidden.device, work, candidates(product)) or "tma"
