"""How large the calls of a rollout may get, and calls of all kinds within these bounds.

Schedules are picked by sizes, so calls of other sizes run other kernels. The calls here meet the
kernels of all others: each op is asked for its picks by being run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_consistency.rollout.device.ragged_call import RaggedShape

GROWTH = 1.19
"""Each multiple of 16 among the numbers of rows is at most so many times the one before, or the
next."""

CHUNKS = (1, 2, 3, 5, 10, 20, 40, 80)
"""New tokens of a sequence behind a past: few of them are spread over programs."""

PASTS = (16, 100, 500, 1000, 2000, 4000)
"""Keys of such a past: more of them are spread over more programs."""


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


def ragged_shapes(bounds: RolloutBounds) -> Iterator[RaggedShape]:
    """Calls of chunks that continue a past, as the prefix cache leaves them; then of new prompts,
    for all numbers of tokens and sampled rows. The first take the compiler the longest."""
    for queries in CHUNKS:
        for past in PASTS:
            for sequences in {1, min(bounds.sequences, bounds.tokens // queries, 8)} - {0}:
                if queries + past <= bounds.longest and queries * sequences <= bounds.tokens:
                    yield RaggedShape(sequences=sequences, queries=queries, past=past)
    for rows in row_counts(bounds.tokens):
        sequences = -(-rows // bounds.longest)
        if sequences <= bounds.sequences:
            queries = rows // sequences
            sampled = min(rows, bounds.sequences)
            yield RaggedShape(sequences=sequences, queries=queries, sampled=sampled)
