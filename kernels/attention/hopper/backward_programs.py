"""Which programs the backward pass of `hopper/backward.py` has, and in which order they start.

A program owns `KEYS` keys of one KV head, for all of the group's query heads or for one. Programs
for the same keys continue each other's sums of dk and dv, head after head; programs for the same
head continue each other's chains of dq, keys after keys. So a program waits for others, which must
run already: the order puts them before it. No bit depends on the cut or the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences, from_host
from rl_consistency.kernels.attention.schedules import FIVE_PRODUCTS
from rl_consistency.kernels.core.grid import cdiv

KEYS, QUERIES = FIVE_PRODUCTS.keys, FIVE_PRODUCTS.rows
APART = 1.25
"""How far apart sequences and KV heads lie in the order of programs for all heads, as a multiple of
the programs of one that run at a time. Measured (ADR 7)."""
WAVE = 8
"""Steps by which a tile of keys starts after the one before, in that case: a tile begins at later
queries, and its program should not wait for them. By a model of the waits."""
HANDOVER = 1.5
"""Steps that it takes to hand sums of dk and dv over."""
IDLE = 0.6
"""The part of one round of programs for all heads that is spent waiting: each tile of keys keeps
the pace of the first in every head, and ends with it. By the same model (docs/log.md)."""
NUMBERS = 6
"""Numbers in a program's entry: sequence, first key, KV head, first head of the group, heads, place
of its sums."""


@dataclass(frozen=True)
class Programs:
    """The programs of a launch."""

    entries: Tensor
    """[programs, 6] int32 on a device, in the order of their ids; see `NUMBERS`."""
    places: int
    """Tiles of keys and KV heads whose sums pass through memory; 0 where none do. Splitting pays up
    to about twelve rounds of programs: 200 MiB at 132 multiprocessors and heads of 128."""


def backward_programs(
    layout: PackedSequences,
    device: torch.device,
    kv_heads: int,
    group: int,
    multiprocessors: int,
    window: int | None,
    split: bool | None = None,
) -> Programs:
    """The programs of a call, made once for a layout. Tests give `split`: whether each query head
    has programs of its own."""
    if split is None:
        asked = (kv_heads, group, multiprocessors, window)
        split = layout.kept(("splitting", *asked), lambda: _splitting_pays(layout, *asked))
    return layout.kept(
        ("backward_programs", device, kv_heads, group, multiprocessors, split),
        lambda: _listed(layout, device, kv_heads, group, multiprocessors, split),
    )


def _splitting_pays(
    layout: PackedSequences, kv_heads: int, group: int, multiprocessors: int, window: int | None
) -> bool:
    """Whether handing sums over should cost less than waiting."""
    if group == 1 or (window is not None and window < layout.most_queries):
        return False  # with a window tiles have about equally many steps: nobody waits long
    tiles = sum(cdiv(n, KEYS) for n in layout.query_lens)
    if tiles * kv_heads <= multiprocessors:
        return False  # all run at once, and the first tile takes all heads in any case
    steps = sum(cdiv(n - i, QUERIES) for n in layout.query_lens for i in range(0, n, KEYS)) / tiles
    rounds = tiles * kv_heads / multiprocessors
    return 0.95 * steps / (steps + HANDOVER) > 1 - IDLE / rounds


def _listed(
    layout: PackedSequences,
    device: torch.device,
    kv_heads: int,
    group: int,
    multiprocessors: int,
    split: bool,
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
    if split:
        # When a head's first tile starts, and how long after it another: both in steps.
        steps = (queries + QUERIES - 1) // QUERIES + HANDOVER
        longest = cdiv(layout.most_queries, QUERIES) + HANDOVER
        pace = max(longest, float(steps.sum()) / multiprocessors)
        head = torch.arange(group).repeat_interleave(len(tiles))
        start = head * pace + (first_key // KEYS * WAVE).repeat(group)
        columns = [x.repeat(group) for x in (sequence, first_key, kv_head)]
        columns += [head, torch.ones_like(head), place.repeat(group)]
    else:
        # Tiles of one sequence and head would end together if they ran side by side. So sequences
        # and heads lie apart: they end at different times, and their next tiles start one by one.
        pairs = max(1, len(layout.query_lens) * kv_heads)
        resident = multiprocessors / pairs
        apart = APART * resident if resident >= 2 else 0.0
        start = (sequence * kv_heads + kv_head).double() / pairs * KEYS * apart - queries
        columns = [sequence, first_key, kv_head]
        columns += [torch.zeros_like(place), torch.full_like(place, group), place]
    order = torch.argsort(start, stable=True)
    entries = torch.stack(columns, dim=1)[order].to(torch.int32).contiguous()
    return Programs(from_host(entries, device), len(tiles) if split and group > 1 else 0)
