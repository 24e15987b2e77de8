"""Which programs the backward pass of `hopper/backward.py` has, and in which order they start.

A program owns `KEYS` keys of one KV head, for all of the group's query heads or for some. Programs
for the same keys continue each other's sums of dk and dv, head after head; programs for the same
head continue each other's chains of dq, keys after keys. So a program waits for others, which must
run already: the order puts them before it. No bit depends on the cut or the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences, from_host
from rl_consistency.kernels.attention.schedules import FIVE_PRODUCTS
from rl_consistency.kernels.core.launch import cdiv

KEYS, QUERIES = FIVE_PRODUCTS.keys, FIVE_PRODUCTS.rows
APART = 1.25
"""How far apart sequences and KV heads lie in the order of programs for all heads, as a multiple of
the programs of one that run at a time. Measured (ADR 7)."""
WAVE = 4
"""Steps per head of a program by which a tile of keys starts after the one before, in the order of
programs for a part of the group: a tile begins at later queries, and its program should not wait
for them."""
HANDOVER = 5
"""Steps that a program for a part of the group costs beside its own: among them to hand sums of dk
and dv over. Fitted to 27 shapes (docs/log.md)."""
ALONE = 2
"""Steps that a program for all heads costs beside its own. Fitted likewise."""
IDLE = 0.5
"""The part of one round of programs that is spent waiting: each tile of keys keeps the pace of the
first in every head, and ends with it. Fitted likewise."""
ROUNDS = 3
"""The most rounds of programs for all heads whose groups are parted. With more, parts gain up to
0.15 and lose up to 0.13, and the sums above do not say which."""
NUMBERS = 6
"""Numbers in a program's entry: sequence, first key, KV head, first head of the group, heads, place
of its sums."""


@dataclass(frozen=True)
class Programs:
    """The programs of a launch."""

    entries: Tensor
    """[programs, 6] int32 on a device, in the order of their ids; see `NUMBERS`."""
    places: int
    """Tiles of keys and KV heads whose sums pass through memory; 0 where none do. The sums are at
    most 2 / group of the chains' size."""


def backward_programs(
    layout: PackedSequences,
    device: torch.device,
    kv_heads: int,
    group: int,
    multiprocessors: int,
    window: int | None,
    heads: int | None = None,
) -> Programs:
    """The programs of a call, made once for a layout. Tests give `heads`: the most query heads that
    a program takes."""
    asked = (kv_heads, group, multiprocessors, window)
    if heads is None:
        heads = layout.kept(("heads", *asked), lambda: _heads_of_a_program(layout, *asked))
    return layout.kept(
        ("backward_programs", device, kv_heads, group, multiprocessors, heads),
        lambda: _listed(layout, device, kv_heads, group, multiprocessors, heads),
    )


def _heads_of_a_program(
    layout: PackedSequences, kv_heads: int, group: int, multiprocessors: int, window: int | None
) -> int:
    """The most query heads of a program: where few programs share the device, parts of the group
    wait less for one another than they cost."""
    if window is not None and window < layout.most_queries:
        return group  # tiles have about equally many steps: waits are short
    tiles = sum(cdiv(n, KEYS) for n in layout.query_lens)
    rounds = tiles * kv_heads / multiprocessors
    if not 1 < rounds <= ROUNDS:
        return group  # in one round all run at once, and the first tile takes all heads anyway
    steps = sum(cdiv(n - i, QUERIES) for n in layout.query_lens for i in range(0, n, KEYS)) / tiles

    def cost(heads: int) -> float:
        parts = cdiv(group, heads)
        waits = 1 + IDLE / (rounds * parts)
        return group * steps * waits + parts * (HANDOVER if parts > 1 else ALONE)

    # No part has one head: two take less time in every shape measured.
    return min((cdiv(group, parts) for parts in range(1, max(group // 2, 1) + 1)), key=cost)


def _listed(
    layout: PackedSequences,
    device: torch.device,
    kv_heads: int,
    group: int,
    multiprocessors: int,
    heads: int,
) -> Programs:
    tiles = [
        (sequence, first_key, kv_head)
        for sequence, queries in enumerate(layout.query_lens)
        for first_key in range(0, queries, KEYS)
        for kv_head in range(kv_heads)
    ]
    sequence, first_key, kv_head = torch.tensor(tiles, dtype=torch.int64).view(-1, 3).unbind(1)
    queries = torch.tensor(list(layout.query_lens), dtype=torch.int64)[sequence] - first_key
    place = torch.arange(len(tiles))
    count = cdiv(group, heads)
    if count > 1:
        # Smaller parts come first: so first / size, rounded up, is the number of parts before one.
        sizes = [(group + i) // count for i in range(count)]
        # When a part's first tile starts, and how long after it another: both in steps.
        begin, starts, parts = 0.0, [], []
        for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            starts.append(begin + first_key // KEYS * (WAVE * size))
            own = (torch.full_like(place, first), torch.full_like(place, size))
            parts.append(torch.stack([sequence, first_key, kv_head, *own, place], dim=1))
            steps = (queries + QUERIES - 1) // QUERIES * size + HANDOVER
            longest = cdiv(layout.most_queries, QUERIES) * size + HANDOVER
            begin += max(longest, float(steps.sum()) / multiprocessors)
        start, entries = torch.cat(starts), torch.cat(parts)
    else:
        # Tiles of one sequence and head would end together if they ran side by side. So sequences
        # and heads lie apart: they end at different times, and their next tiles start one by one.
        pairs = max(1, len(layout.query_lens) * kv_heads)
        resident = multiprocessors / pairs
        apart = APART * resident if resident >= 2 else 0.0
        start = (sequence * kv_heads + kv_head).double() / pairs * KEYS * apart - queries
        own = (torch.zeros_like(place), torch.full_like(place, group))
        entries = torch.stack([sequence, first_key, kv_head, *own, place], dim=1)
    order = torch.argsort(start, stable=True)
    entries = entries[order].to(torch.int32).contiguous()
    return Programs(from_host(entries, device), len(tiles) if count > 1 else 0)
