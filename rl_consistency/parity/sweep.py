"""The arrangements in which the same tokens must give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch

SHORT = 33
"""Samples up to this length fill a large batch once every length has appeared."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How far a verification goes.

    Example: batches (1, 2), lengths (1, 40) give samples of lengths [1, 40] and the arrangements
    [[0], [1]], [[0, 1]], the batch permuted, and one sample at every place of a batch.
    """

    batches: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Sequences in one call."""
    lengths: tuple[int, ...] = (1, 31, 32, 33, 127, 129, 255, 256, 257, 512)
    """Tokens of a sequence; ascending."""
    chunks: tuple[int, ...] = (7, 64, 512)
    """Prompt tokens of one sequence in one call."""
    pads: tuple[int, ...] = (0, 1, 5, 64)
    """Columns of padding beside the longest sequence."""
    cache_blocks: tuple[int, ...] = (1, 7, 16, 48)
    """Tokens of one block of the KV cache."""

    def within(self, context: int) -> Sweep:
        """The same sweep without sequences longer than a model's context."""
        lengths = tuple(n for n in self.lengths if n <= context) or (context,)
        return Sweep(
            batches=self.batches,
            lengths=lengths,
            chunks=self.chunks,
            pads=self.pads,
            cache_blocks=self.cache_blocks,
        )

    def sample_lengths(self) -> list[int]:
        """One sample of every length, then short ones up to the largest batch."""
        short = [n for n in self.lengths if n <= SHORT] or [self.lengths[0]]
        filler = max(max(self.batches) - len(self.lengths), 0)
        return [*self.lengths, *islice(cycle(short), filler)]

    def row_counts(self) -> list[int]:
        """Rows of a call to an op that treats rows one by one."""
        return sorted({*self.batches, *self.lengths, *range(2, 20)})

    def arrangements(self) -> Iterator[tuple[str, list[list[int]]]]:
        """(name, calls as lists of sample indices); every named arrangement stands for itself."""
        everything = list(range(len(self.sample_lengths())))
        for size in self.batches:
            yield f"batch {size}", split(everything, size)
        order = torch.randperm(
            len(everything), generator=torch.Generator().manual_seed(len(everything))
        ).tolist()
        yield "permuted batch", [order]
        yield "other neighbours", split(order, 3)
        places = min(len(everything), 9)
        neighbours = everything[1:places]
        yield (
            "every place in a batch",
            [[*neighbours[:i], 0, *neighbours[i:]] for i in range(places)],
        )


FULL = Sweep()
"""The whole sweep."""

QUICK = Sweep(
    batches=(1, 8, 16),
    lengths=(1, 31, 33, 129, 257),
    chunks=(7, 64),
    pads=(0, 5),
    cache_blocks=(7, 16),
)
"""A smaller one that still crosses every tile border: for further models and the controls."""


def split(samples: list[int], size: int) -> list[list[int]]:
    """Consecutive groups of `size`, the last one shorter."""
    return [samples[i : i + size] for i in range(0, len(samples), size)]
