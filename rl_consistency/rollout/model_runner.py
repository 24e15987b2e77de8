"""Owns the KV cache and turns a step's chunks into logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.attention_layout import PagedAttention
from rl_consistency.models.forward import next_token_logits, paged_hidden_states
from rl_consistency.models.packing import from_host
from rl_consistency.rollout.scheduler import ScheduledChunk

DEFAULT_TOKENS_PER_SEQUENCE = 1024
"""Tokens of each running sequence the default cache has room for."""

CPU_CACHE_BYTES = 4 << 30
"""Upper bound of the default cache on a CPU."""

GPU_CACHE_SHARE = 0.4
"""Upper bound of the default cache on a GPU, as a share of the memory free when the cache is made;
a trainer in the same process needs the rest for gradients, moments and activations."""


class ModelRunner:
    """Runs the model over a paged KV cache; reads its weights in place, call by call.

    The cache has two tensors per layer, [num_blocks, block_size, num_key_value_heads, head_dim] in
    the model's dtype, on its device. Without `num_blocks` it has room for `max_num_seqs` sequences
    of `tokens_per_sequence` tokens (1024 where that is None, and never more than the model's
    context), at most 4 GiB on a CPU and 40 % of the free memory on a GPU, and always for one such
    sequence. The size moves no bit of the output, only when sequences are preempted.

    Raises:
        ValueError: the GPU has no room for the cache.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_size: int,
        num_blocks: int | None,
        max_num_seqs: int,
        tokens_per_sequence: int | None = None,
    ) -> None:
        config = model.config
        self._model = model
        self._block_size = block_size
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        row = (block_size, config.num_key_value_heads, head_dim)
        block_bytes = 2 * config.num_hidden_layers * row[0] * row[1] * row[2] * model.dtype.itemsize
        if num_blocks is None:
            tokens = tokens_per_sequence or DEFAULT_TOKENS_PER_SEQUENCE
            per_sequence = -(-min(config.max_position_embeddings, tokens) // block_size)
            affordable = _cache_bytes(model.device) // block_bytes
            num_blocks = max(per_sequence, min(max_num_seqs * per_sequence, affordable))
        assert num_blocks is not None
        self.num_blocks = num_blocks
        try:
            # Zeros: a slot never written must hold no NaN, which no mask of weight 0 would remove.
            self._key_cache, self._value_cache = (
                [
                    torch.zeros((num_blocks, *row), dtype=model.dtype, device=model.device)
                    for _ in range(config.num_hidden_layers)
                ]
                for _ in range(2)
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no room on {model.device} for a KV cache of {num_blocks} blocks of {block_size} "
                f"tokens ({num_blocks * block_bytes / 2**30:.1f} GiB): lower num_kv_blocks"
            ) from error

    @property
    def device(self) -> torch.device:
        return self._key_cache[0].device

    def check_model(self) -> None:
        """ValueError if the model was moved or cast since the cache was allocated."""
        cache = self._key_cache[0]
        if (self._model.dtype, self._model.device) != (cache.dtype, cache.device):
            raise ValueError(
                f"the KV cache was made for a model in {cache.dtype} on {cache.device} and the "
                f"model is now in {self._model.dtype} on {self._model.device}; build the "
                "RolloutEngine after moving or casting the model"
            )

    @torch.no_grad()
    def logits(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute the chunks' tokens, write their keys and values, and return logits.

        Returns [n, V] fp32: one row for each chunk that samples, in the chunks' order.
        """
        hidden = paged_hidden_states(self._model, *self._inputs(chunks))
        rows: list[int] = []
        end = 0
        for chunk in chunks:
            end += chunk.length
            if chunk.samples:
                rows.append(end - 1)
        return next_token_logits(self._model, hidden[self._on_device(rows)])

    def _inputs(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor, PagedAttention]:
        """(input_ids [T], position_ids [T], layout) of one call."""
        size = self._block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_starts: list[int] = []
        block_tables: list[list[int]] = []
        for chunk in chunks:
            table = chunk.sequence.block_table[: -(-chunk.end // size)]
            span = range(chunk.start, chunk.end)
            query_starts.append(len(token_ids))
            token_ids.extend(chunk.sequence.token_ids[chunk.start : chunk.end])
            positions.extend(span)
            slots.extend([table[position // size] * size + position % size for position in span])
            block_tables.append(table)
        paged = PagedAttention(
            query_starts=query_starts,
            query_lens=[chunk.length for chunk in chunks],
            context_lens=[chunk.end for chunk in chunks],
            block_tables=block_tables,
            slot_mapping=self._on_device(slots),
            key_cache=self._key_cache,
            value_cache=self._value_cache,
            block_size=size,
        )
        return self._on_device(token_ids), self._on_device(positions), paged

    def _on_device(self, values: list[int]) -> Tensor:
        """[n] int64."""
        return from_host(np.array(values, dtype=np.int64), self.device)


def _cache_bytes(device: torch.device) -> int:
    """Most bytes the default cache may take."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + reusable) * GPU_CACHE_SHARE)
