"""The memory behind the block numbers: keys and values of all layers, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention.cache_write_triton import zero_cache
from rl_consistency.models.forward import cache_sizes

DEFAULT_TOKENS_PER_SEQUENCE = 1024  # tokens of each running sequence the default cache has room for

CPU_CACHE_BYTES, GPU_CACHE_SHARE = 4 << 30, 0.4
"""Upper bounds of the default cache; on a GPU a share of the free memory: a trainer in the same
process needs the rest."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KVCache:
    """Two tensors per layer, [num_blocks + 1, block_size, num_key_value_heads, head_dim] each, in
    memory as `zero_cache` lays them out.

    Padding rows write to block number `num_blocks`, behind the last. No sequence holds or reads it.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    block_size: int
    num_blocks: int  # blocks that sequences may hold

    @classmethod
    def allocate(
        cls,
        model: Any,
        *,
        block_size: int,
        num_blocks: int | None,
        max_num_seqs: int,
        tokens_per_sequence: int | None = None,
    ) -> KVCache:
        """A cache in the model's dtype, on its device.

        Without `num_blocks` it has room for `max_num_seqs` sequences of `tokens_per_sequence`
        tokens (None is 1024; the model's context at most), within 4 GiB on a CPU and 40 % of the
        free memory on a GPU, but always for one. ValueError if the device has no room for it.
        """
        shape = cache_shape(model, block_size, num_blocks, max_num_seqs, tokens_per_sequence)
        count, rows, *row = shape
        try:
            # Zeros: a NaN in a slot that was never written would pass a mask of weight 0.
            tensors = [
                zero_cache(rows, *row, dtype=model.dtype, device=model.device) for _ in range(count)
            ]
        except torch.OutOfMemoryError as error:
            size = math.prod(shape) * model.dtype.itemsize / 2**30
            raise ValueError(
                f"no room on {model.device} for a KV cache of {rows - 1} blocks of {block_size} "
                f"tokens ({size:.1f} GiB): lower num_kv_blocks"
            ) from error
        keys, values = tensors[: count // 2], tensors[count // 2 :]
        return cls(keys=keys, values=values, block_size=block_size, num_blocks=rows - 1)


def cache_shape(
    model: Any,
    block_size: int,
    num_blocks: int | None,
    max_num_seqs: int,
    tokens_per_sequence: int | None,
) -> tuple[int, int, int, int, int]:
    """[2 * layers, num_blocks + 1, block_size, num_key_value_heads, head_dim] of the cache that
    `KVCache.allocate` would make now."""
    layers, kv_heads, head_dim = cache_sizes(model)
    row = (block_size, kv_heads, head_dim)
    if num_blocks is None:
        tokens = tokens_per_sequence or DEFAULT_TOKENS_PER_SEQUENCE
        per_sequence = -(-min(model.config.max_position_embeddings, tokens) // block_size)
        block_bytes = 2 * layers * math.prod(row) * model.dtype.itemsize
        affordable = cache_bytes(model.device) // block_bytes
        num_blocks = max(per_sequence, min(max_num_seqs * per_sequence, affordable))
    assert num_blocks is not None
    return 2 * layers, num_blocks + 1, *row


def cache_bytes(device: torch.device) -> int:
    """Most bytes the default cache may take."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + reusable) * GPU_CACHE_SHARE)
