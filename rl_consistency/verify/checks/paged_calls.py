"""Sequences fed to a paged KV cache call by call, without a scheduler: chunks and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.verify.sweep import Sweep


@dataclass(frozen=True)
class PagedCall:
    """One call: which tokens of which sequences, and the cache they see."""

    spans: list[tuple[int, int, int]]
    """(sequence, first token, end) of each part, in row order."""
    paged: PagedAttention


def chunked(length: int, chunk: int) -> list[int]:
    """Sizes of the parts of a sequence cut into chunks."""
    whole, rest = divmod(length, chunk)
    return [chunk] * whole + ([rest] if rest else [])


def decoded(length: int) -> list[int]:
    """One part for the prompt, then the last 12 tokens one at a time."""
    tail = min(length, 12)
    return ([length - tail] if length > tail else []) + [1] * tail


def paged_plans(sweep: Sweep) -> Iterator[tuple[str, int, list[int], Callable[[int], list[int]]]]:
    """(name, tokens of a cache block, samples, length -> sizes of the parts) of a sweep: every
    chunk size, decode, and one prefill per block size."""
    longest = max(sweep.sample_lengths())
    ways: list[tuple[str, int, Callable[[int], list[int]]]] = [
        (f"chunk {c}", c, partial(chunked, chunk=c)) for c in sweep.chunks
    ]
    ways += [("decode", longest, decoded)]
    ways += [("prefill", longest, lambda n: [n]) for _ in sweep.cache_blocks]
    for (name, chunk, cut), size in zip(ways, cycle(sweep.cache_blocks), strict=False):
        yield f"{name}, cache blocks of {size}", size, sweep.paged_samples(chunk), cut


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
    shape = (sum(needed), block_size, kv_heads, head_dim)
    empty = torch.full((2, num_layers, *shape), torch.nan, dtype=dtype, device=device)
    key_cache, value_cache = (list(part.unbind(0)) for part in empty)
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


def paged_rows(
    schedules: Sequence[Sequence[int]], run: Callable[[PagedCall], Tensor], **cache: Any
) -> list[Tensor]:
    """Rows of each sequence out of all `paged_calls`; `run` gives the rows of one call."""
    parts: list[list[Tensor]] = [[] for _ in schedules]
    for call in paged_calls(schedules, **cache):
        rows = run(call).split([end - start for _, start, end in call.spans])
        for (i, _, _), part in zip(call.spans, rows, strict=True):
            parts[i].append(part)
    return [torch.cat(p) for p in parts]


def cached_rows(paged: Any, layer: int) -> list[Tensor]:
    """Keys and values [slots, Hkv, D] of one layer's cache."""
    caches = (paged.key_cache[layer], paged.value_cache[layer])
    return [cache.view(-1, *cache.shape[2:]) for cache in caches]
