"""The memory behind the block numbers: keys and values of all layers, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULT_TOKENS_PER_SEQUENCE = 1024  # tokens of each running sequence the default cache has room for

CPU_CACHE_BYTES, GPU_CACHE_SHARE = 4 << 30, 0.4
"""Upper bounds of the default cache; on a GPU a share of the free memory: a trainer in the same
process needs the rest."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KVCache:
    """Two tensors per layer, [num_blocks + 1, block_size, num_key_value_heads, head_dim] each.

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
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        row = (block_size, config.num_key_value_heads, head_dim)
        layers = config.num_hidden_layers
        block_bytes = 2 * layers * math.prod(row) * model.dtype.itemsize
        if num_blocks is None:
            tokens = tokens_per_sequence or DEFAULT_TOKENS_PER_SEQUENCE
            per_sequence = -(-min(config.max_position_embeddings, tokens) // block_size)
            affordable = cache_bytes(model.device) // block_bytes
            num_blocks = max(per_sequence, min(max_num_seqs * per_sequence, affordable))
        assert num_blocks is not None
        shape = (num_blocks + 1, *row)
        try:
            # Zeros: a NaN in a slot that was never written would pass a mask of weight 0.
            keys, values = (
                [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(layers)]
                for _ in range(2)
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no room on {model.device} for a KV cache of {num_blocks} blocks of {block_size} "
                f"tokens ({num_blocks * block_bytes / 2**30:.1f} GiB): lower num_kv_blocks"
            ) from error
        return cls(keys=keys, values=values, block_size=block_size, num_blocks=num_blocks)


def cache_bytes(device: torch.device) -> int:
    """Most bytes the default cache may take."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + reusable) * GPU_CACHE_SHARE)
