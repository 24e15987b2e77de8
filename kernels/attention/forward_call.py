"""One call of `attention_fwd` as its kernels see it: operands, results, tiles and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention.schedules import Schedule, padded
from rl_consistency.kernels.attention.shared_keys import SharedTables


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """What every forward kernel is launched with. The elements of a head lie side by side."""

    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hkv, D] packed, or [slots, Hkv, D] of a paged cache; v alike
    v: Tensor
    out: Tensor  # [T, H, D], and lse [T, H]: the kernels write both
    lse: Tensor
    tiles: Tensor  # [tiles, 2] int32: a sequence and the tile's first row in it
    numbers: tuple[Tensor, Tensor, Tensor]  # first row, queries and keys of each sequence, int32
    shared: SharedTables | None  # runs of sequences whose first keys are read once; None: none
    block_table: Tensor  # [sequences, blocks] int32, physical blocks of a paged cache
    block_size: int | None  # tokens in one physical block; None where keys are packed
    keys: int  # keys in one step of the fold
    most_blocks: int  # steps of the longest tile's fold
    stored: int  # rows that a tile writes where programs share its key blocks
    reach: int  # the window as kernels take it
    windowed: bool
    settled: bool  # as the layout says of its tables and numbers
    factor: float  # scale of the scores in log2 units

    @cached_property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @cached_property
    def dim(self) -> int:
        """D rounded up to a power of two of at least 16."""
        return padded(self.head_dim)

    @cached_property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.kv_heads

    @cached_property
    def grid(self) -> int:
        """Tiles times KV heads."""
        return len(self.tiles) * self.kv_heads

    @property
    def operand_strides(self) -> tuple[int, ...]:
        """Strides of a token and a head in q, k and v."""
        return (*self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2])

    @property
    def result_strides(self) -> tuple[int, ...]:
        """Strides of a token and a head in o, and of a token in lse."""
        return (*self.out.stride()[:2], self.lse.stride(0))

    def constants(self, schedule: Schedule) -> dict[str, Any]:
        """Compile-time arguments and options that the Triton kernels share."""
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "ROWS": schedule.rows,
            "KEYS": self.keys,
            "HEAD_DIM": self.head_dim,
            "DIM": self.dim,
            "WINDOWED": self.windowed,
            "num_stages": schedule.stages,
            "enable_fp_fusion": False,
        }

    def memory_of_blocks(self, grid: int, stored: int) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 memory for every key block's m [places], lanes [places, 8] and acc [places, dim].

        `grid` is tiles times KV heads, and a block writes `stored` rows.
        """
        places = grid * self.most_blocks * stored
        m, lanes, acc = (
            torch.empty(shape, dtype=torch.float32, device=self.q.device)
            for shape in ((places,), (places, 8), (places, self.dim))
        )
        return m, lanes, acc
