"""How large the calls of a rollout may get, and calls of all kinds within these bounds.

Schedules are picked by sizes, so calls of other sizes run other kernels. The calls here meet the
kernels of all others. Attention is asked for its plans; every other op by being run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_consistency.kernels.attention.forward_plan import AlikeSequences, plan_forward
from rl_consistency.models.forward import attention_windows
from rl_consistency.rollout.device.ragged_call import RaggedShape

GROWTH = 1.19
"""Each multiple of 16 among the numbers of rows is at most so many times the one before, or the
next."""

CHUNKS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 64, 80)
"""New tokens of a sequence behind a past, as the prefix cache leaves them."""

EACH_OF = 40
"""Up to so many sequences behind a past every number is tried. Their tiles alone do not fill a GPU,
and how many programs share a tile changes from one number to the next."""

SHORTEST_PAST = 48
"""Keys of the shortest past that is tried: those of one block are all alike."""

MORE_SEQUENCES, MORE_KEYS = 1.1, 1.4
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
    bounds: RolloutBounds, kernels: Callable[[RaggedShape], Hashable]
) -> Iterator[RaggedShape]:
    """Calls of chunks that continue a past, one for each of the attention `kernels` that such calls
    have; then of new prompts, for all numbers of tokens and sampled rows. The first take the
    compiler the longest."""
    met = set()
    for shape in _continued(bounds):
        if (found := kernels(shape)) not in met:
            met.add(found)
            yield shape
    for rows in row_counts(bounds.tokens):
        sequences = -(-rows // bounds.longest)
        if sequences <= bounds.sequences:
            queries = rows // sequences
            sampled = min(rows, bounds.sequences)
            yield RaggedShape(sequences=sequences, queries=queries, sampled=sampled)


def attention_kernels(model: Any, cache: Tensor) -> Callable[[RaggedShape], Hashable]:
    """The function that tells which attention kernels a call that continues a past has; `cache`
    [blocks, block_size, Hkv, D] lies as that of every layer."""
    q = cache.new_empty((1, model.config.num_attention_heads, cache.shape[-1]))
    keys, windows = cache.view(-1, *cache.shape[2:]), attention_windows(model)

    def kernels(shape: RaggedShape) -> Hashable:
        layout = AlikeSequences.of(shape.sequences, shape.queries, shape.past, cache)
        return tuple([plan_forward(q, keys, keys, layout, window).kernel for window in windows])

    return kernels


def _continued(bounds: RolloutBounds) -> Iterator[RaggedShape]:
    for queries in CHUNKS:
        most, longest = min(bounds.sequences, bounds.tokens // queries), bounds.longest - queries
        if most < 1 or longest < 1:
            return
        pasts = _up_to(longest, SHORTEST_PAST, MORE_KEYS)
        for sequences in (*range(1, min(most, EACH_OF)), *_up_to(most, EACH_OF, MORE_SEQUENCES)):
            for past in pasts:
                yield RaggedShape(sequences=sequences, queries=queries, past=past)


def _up_to(most: int, first: int, factor: float) -> list[int]:
    """Numbers from `first` on, each larger by a factor, and at the end `most`."""
    found, number = [], first
    while number < most:
        found.append(number)
        number = int(number * factor)
    return [*found, most]
