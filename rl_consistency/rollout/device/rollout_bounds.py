"""How large the calls of a rollout may get, and calls of all kinds within these bounds.

Schedules are picked by sizes, so calls of other sizes run other kernels. The calls here meet the
kernels of all others. For attention its plans tell which; every other op is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_consistency.kernels.attention.layout import AlikeSequences
from rl_consistency.kernels.attention.schedules import plan_forward
from rl_consistency.models.forward import attention_windows
from rl_consistency.numerics.strict import is_canonical
from rl_consistency.rollout.device.ragged_call import RaggedShape

GROWTH = 1.19
"""Each multiple of 16 among the numbers of rows is at most so many times the one before, or the
next."""

CHUNKS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 64, 80)
"""New tokens of a sequence behind a past: what the prefix cache leaves, drafts without graphs, and
pieces of long prompts."""

EVERY_NUMBER_TO = 40
"""Up to so many sequences behind a past every number is tried. Their tiles alone do not fill a GPU,
and how many programs share a tile changes from one number to the next."""

SHORTEST_PAST = 48
"""Keys of the shortest past that is tried: those of one block are all alike."""

SEQUENCES_GROWTH, KEYS_GROWTH = 1.1, 1.4
"""The factors from one number of sequences, and of keys, to the next that is tried."""


@dataclass(frozen=True, kw_only=True)
class RolloutBounds:
    """The largest sizes of a rollout's calls."""

    tokens: int
    """Tokens of one step."""
    sequences: int
    """Sequences that run at a time."""
    longest: int
    """Tokens of one sequence."""
    batch_sizes: tuple[int, ...]
    """Numbers of sequences that decode together."""
    draft: int = 0
    """Tokens of the longest draft that is verified without a graph."""


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to `most`: powers of two and multiples of 16, and numbers beside them,
    because Triton compiles other kernels for multiples of 16."""
    wanted, rows = {1, 2, 4, 8}, 16
    while rows <= most:
        wanted |= {rows, rows + 1}
        grown = max(rows + 16, int(rows * GROWTH) // 16 * 16)
        # A table may hold an entry for a power of two alone.
        rows = min(grown, 1 << rows.bit_length())
    return sorted({rows for rows in wanted if rows < most} | {most})


def ragged_shapes(
    bounds: RolloutBounds, kernels_of: Callable[[RaggedShape], Hashable]
) -> Iterator[RaggedShape]:
    """Calls of chunks that continue a past, one for each that `kernels_of` tells from the others;
    then of new prompts, for all numbers of tokens and sampled rows. The first take the compiler the
    longest.

    Chunks of a call are alike here. One long chunk among short ones may have a kernel that none of
    these has, if a step has fewer tokens than 17 times its sequences.
    """
    met = set()
    for shape in _continued(bounds):
        if (found := kernels_of(shape)) not in met:
            met.add(found)
            yield shape
    for rows in row_counts(bounds.tokens):
        sequences = -(-rows // bounds.longest)
        if sequences <= bounds.sequences:
            queries = rows // sequences
            sampled = min(rows, bounds.sequences * (1 + bounds.draft))
            yield RaggedShape(sequences=sequences, queries=queries, sampled=sampled)


def attention_kernels(model: Any, cache: Tensor) -> Callable[[RaggedShape], Hashable]:
    """The function that tells which attention kernels a call that continues a past has. `cache`
    [blocks, block_size, Hkv, D] is any layer's; all have its shape, strides and dtype."""
    if not is_canonical("attention"):
        return lambda shape: None
    q = cache.new_empty((1, model.config.num_attention_heads, cache.shape[-1]))
    keys, windows = cache.view(-1, *cache.shape[2:]), attention_windows(model)

    def kernels_of(shape: RaggedShape) -> Hashable:
        layout = AlikeSequences.of(shape.sequences, shape.queries, shape.past, cache)
        return tuple([plan_forward(q, keys, keys, layout, window).kernel for window in windows])

    return kernels_of


def _continued(bounds: RolloutBounds) -> Iterator[RaggedShape]:
    for queries in CHUNKS:
        most, longest = min(bounds.sequences, bounds.tokens // queries), bounds.longest - queries
        if most < 1 or longest < 1:
            return
        pasts = _up_to(longest, SHORTEST_PAST, KEYS_GROWTH)
        few = range(1, min(most, EVERY_NUMBER_TO))
        for sequences in (*few, *_up_to(most, EVERY_NUMBER_TO, SEQUENCES_GROWTH)):
            for past in pasts:
                yield RaggedShape(sequences=sequences, queries=queries, past=past)


def _up_to(most: int, first: int, factor: float) -> list[int]:
    """Numbers from `first` on, each larger by a factor, and at the end `most`."""
    found, number = [], first
    while number < most:
        found.append(number)
        number = max(number + 1, int(number * factor))
    return [*found, most]
