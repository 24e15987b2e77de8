"""Sequences fed to a paged KV cache call by call, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_consistency.kernels.attention.cache_write_triton import zero_cache
from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.models.forward import cache_sizes


@dataclass(frozen=True)
class PagedCall:
    """One call: which tokens of which sequences, and the cache they see."""

    spans: list[tuple[int, int, int]]
    """(sequence, first token, end) of each part, in row order."""
    paged: PagedAttention


def cache_arguments(model: Any) -> dict[str, Any]:
    """The arguments of `paged_calls` that a model's cache has."""
    layers, kv_heads, head_dim = cache_sizes(model)
    return {
        "num_layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": model.dtype,
        "device": model.device,
    }


def paged_calls(
    schedules: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Iterator[PagedCall]:
    """The calls that feed some sequences part by part, their blocks scattered over a cache of NaN.

    `schedules` are the sizes of each sequence's parts; call i holds every sequence's part i. `seed`
    is of the placement of the blocks, which hold `block_size` tokens each.
    """
    needed = [-(-sum(parts) // block_size) for parts in schedules]
    placement = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed))
    tables = [part.tolist() for part in placement.split(needed)]
    size = (sum(needed), block_size, kv_heads, head_dim)
    key_cache, value_cache = (
        [zero_cache(*size, dtype=dtype, device=device).fill_(torch.nan) for _ in range(num_layers)]
        for _ in "kv"
    )
    done = [0] * len(schedules)
    for turn in range(max(map(len, schedules))):
        spans, slots = [], []
        for i, parts in enumerate(schedules):
            if turn < len(parts):
                start, done[i] = done[i], done[i] + parts[turn]
                spans.append((i, start, done[i]))
                places = (divmod(position, block_size) for position in range(start, done[i]))
                slots += [tables[i][block] * block_size + place for block, place in places]
        lens = [end - start for _, start, end in spans]
        paged = PagedAttention(
            query_starts=[sum(lens[:i]) for i in range(len(lens))],
            query_lens=lens,
            context_lens=[end for _, _, end in spans],
            block_tables=[tables[i] for i, _, _ in spans],
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(device),
            key_cache=key_cache,
            value_cache=value_cache,
            block_size=block_size,
        )
        yield PagedCall(spans, paged)
