"""Ways to feed sequences to a paged KV cache part by part: chunks and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rl_consistency.parity.sides import PagedCall, paged_calls
from rl_consistency.verify.sweep import Sweep


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
