"""One call of `attention_fwd` as its kernels see it: operands, results, tiles and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """What every forward kernel is launched with."""

    q: Tensor
    """[T, H, D], the elements of a head side by side, as in k and v."""
    k: Tensor
    """[T, Hkv, D] packed, or [slots, Hkv, D] of a paged cache."""
    v: Tensor
    """The shape of `k`."""
    out: Tensor
    """[T, H, D], written by the kernels."""
    lse: Tensor
    """[T, H], written by the kernels."""
    tiles: Tensor
    """[tiles, 2] int32: a sequence, and the tile's first row in it."""
    numbers: tuple[Tensor, Tensor, Tensor]
    """First row, number of queries and number of keys of each sequence, int32."""
    block_table: Tensor
    """[sequences, blocks] int32, physical blocks of a paged cache."""
    block_size: int | None
    """Tokens in one physical block; None where keys are packed."""
    keys: int
    """Keys in one step of the fold."""
    most_blocks: int
    """Steps of the fold that any tile needs, at most."""
    stored: int
    """Rows of a tile that are written where its key blocks are spread over programs."""
    reach: int
    """The window, or a number longer than any sequence."""
    windowed: bool
    """Whether the call has a window."""
    factor: float
    """Scale of the scores, in log2 units."""

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.shape[2]

    @property
    def dim(self) -> int:
        """D filled up to a power of two of at least 16."""
        return max(1 << (self.head_dim - 1).bit_length(), 16)

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
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

    def memory_of_blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 memory for key blocks written one by one: m [places], lanes [places, 8] and
        acc [places, dim]."""
        places, device = self.grid * self.most_blocks * self.stored, self.q.device
        m = torch.empty(places, dtype=torch.float32, device=device)
        lanes = torch.empty(places, 8, dtype=torch.float32, device=device)
        return m, lanes, torch.empty(places, self.dim, dtype=torch.float32, device=device)
