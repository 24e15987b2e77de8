"""Owns the KV cache and turns a step's chunks into logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention_layout import PagedAttention
from rl_consistency.models.forward import next_token_logits, paged_hidden_states
from rl_consistency.rollout.scheduler import ScheduledChunk

DEFAULT_TOKENS_PER_SEQUENCE = 1024
"""Tokens of each running sequence the default cache has room for."""

DEFAULT_CACHE_BYTES = {"cpu": 4 << 30, "cuda": 16 << 30}
"""Upper bound of the default cache by device type."""


class ModelRunner:
    """Runs the model over a paged KV cache; reads its weights in place, call by call.

    The cache has two tensors per layer, [num_blocks, block_size, num_key_value_heads, head_dim] in
    the model's dtype, on its device. Without `num_blocks` it has room for `max_num_seqs` sequences
    of 1024 tokens (or the model's context, if shorter), at most 4 GiB on a CPU and 16 GiB on a GPU,
    and always for one such sequence. The size moves no bit of the output, only when sequences are
    preempted.
    """

    def __init__(
        self, model: Any, *, block_size: int, num_blocks: int | None, max_num_seqs: int
    ) -> None:
        config = model.config
        self._model = model
        self._block_size = block_size
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        row = (block_size, config.num_key_value_heads, head_dim)
        if num_blocks is None:
            block_bytes = (
                2 * config.num_hidden_layers * row[0] * row[1] * row[2] * model.dtype.itemsize
            )
            num_blocks = _default_num_blocks(model, block_size, block_bytes, max_num_seqs)
        self.num_blocks = num_blocks
        # Zeros: a slot never written must not hold a NaN, which no mask of weight 0 would remove.
        self._key_cache, self._value_cache = (
            [
                torch.zeros((num_blocks, *row), dtype=model.dtype, device=model.device)
                for _ in range(config.num_hidden_layers)
            ]
            for _ in range(2)
        )

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
        last_rows = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return next_token_logits(self._model, last_rows)

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
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(self.device),
            key_cache=self._key_cache,
            value_cache=self._value_cache,
            block_size=size,
        )
        input_ids = torch.tensor(token_ids, dtype=torch.int64).to(self.device)
        position_ids = torch.tensor(positions, dtype=torch.int64).to(self.device)
        return input_ids, position_ids, paged


def _default_num_blocks(model: Any, block_size: int, block_bytes: int, max_num_seqs: int) -> int:
    tokens = min(model.config.max_position_embeddings, DEFAULT_TOKENS_PER_SEQUENCE)
    per_sequence = -(-tokens // block_size)
    limit = DEFAULT_CACHE_BYTES.get(model.device.type, DEFAULT_CACHE_BYTES["cpu"]) // block_bytes
    return max(per_sequence, min(max_num_seqs * per_sequence, limit))
