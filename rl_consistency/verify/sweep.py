"""The arrangements in which the same tokens must give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rl_consistency.cases.case import Setting

MAX_ROWS = 200
"""Rows of an op whose schedules are compared: ragged for every tile."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How far a verification goes.

    Example: batches (1, 2), lengths (1, 40) give samples of lengths [1, 40] and the arrangements
    [[0], [1]], [[0, 1]], the batch permuted, and one sample at every place of a batch.
    """

    batches: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Sequences in one call."""
    lengths: tuple[int, ...] = (1, 31, 32, 33, 127, 129, 255, 256, 257, 512)
    """Tokens of a sequence; ascending. Ops that treat rows one by one see at most so many."""
    long: tuple[int, ...] = ()
    """Longer sequences, for attention and the chain only; ascending."""
    chunks: tuple[int, ...] = (7, 64, 512)
    """Prompt tokens of one sequence in one call."""
    pads: tuple[int, ...] = (0, 1, 5, 64)
    """Columns of padding beside the longest sequence."""
    cache_blocks: tuple[int, ...] = (1, 7, 16, 48)
    """Tokens of one block of the KV cache."""

    def within(self, context: int) -> Sweep:
        """This sweep without sequences longer than a model's context."""
        return replace(
            self,
            lengths=tuple(n for n in self.lengths if n <= context) or (context,),
            long=tuple(n for n in self.long if n <= context),
        )

    def sample_lengths(self) -> list[int]:
        """One sample of every length, short ones up to the largest batch, then the long ones."""
        short = [n for n in self.lengths if n <= 33] or [self.lengths[0]]
        filler = max(max(self.batches) - len(self.lengths), 0)
        return [*self.lengths, *islice(cycle(short), filler), *self.long]

    def paged_samples(self, chunk: int) -> list[int]:
        """Indices of the samples that are fed `chunk` tokens at a time: in at most 128 calls."""
        lengths = self.sample_lengths()
        few = list(range(min(len(lengths), max(len(self.lengths), 8))))
        longer = range(len(lengths) - len(self.long), len(lengths))
        return few + [i for i in longer if i not in few and lengths[i] <= 128 * chunk]

    def row_counts(self) -> list[int]:
        """Rows of a call to an op that treats rows one by one."""
        return sorted({*self.batches, *self.lengths, *range(2, 20)})

    def arrangements(self) -> Iterator[tuple[str, list[list[int]]]]:
        """(name, calls as lists of sample indices)."""
        everything = list(range(len(self.sample_lengths())))
        for size in self.batches:
            yield f"batch {size}", split(everything, size)
        generator = torch.Generator().manual_seed(len(everything))
        order = torch.randperm(len(everything), generator=generator).tolist()
        yield "permuted batch", [order]
        yield "other neighbours", split(order, 3)
        own = everything[1:9]
        yield "every place in a batch", [[*own[:i], 0, *own[i:]] for i in range(len(own) + 1)]


FULL = Sweep()

QUICK = Sweep(
    batches=(1, 8, 16),
    lengths=(1, 31, 33, 129, 257),
    chunks=(7, 64),
    pads=(0, 5),
    cache_blocks=(7, 16),
)
"""A smaller one that still crosses every tile border: for further models and the controls."""

CUDA_QUICK = replace(QUICK, long=(2048, 8192))
CUDA_FULL = replace(FULL, long=(1024, 2048, 4096, 8192))


def sweep_for(device: torch.device, *, quick: bool) -> Sweep:
    """The sweep that fits a device; a GPU has room for long sequences."""
    full, small = (CUDA_FULL, CUDA_QUICK) if device.type == "cuda" else (FULL, QUICK)
    return small if quick else full


def split(samples: list[int], size: int) -> list[list[int]]:
    """Consecutive groups of `size`, the last one shorter."""
    return [samples[i : i + size] for i in range(0, len(samples), size)]


@dataclass(frozen=True, kw_only=True)
class OpSetup(Setting):
    """One run over the ops: dtype, device, sizes, and how many arrangements."""

    sweep: Sweep = QUICK

    @property
    def rows(self) -> int:
        """Rows of the largest call to an op that treats rows one by one."""
        return max(self.sweep.lengths)


def padded(
    parts: Sequence[Tensor], pad: int, side: str, filler: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Tensors [n] as rows of one batch [parts, longest + pad], padded on the `left` or `right`, and
    the bool mask of what is theirs."""

    def batch(rows: list[Tensor], value: float) -> Tensor:
        together = pad_sequence(rows, True, value, padding_side=side)
        return F.pad(together, (pad, 0) if side == "left" else (0, pad), value=value)

    own = [torch.ones_like(part, dtype=torch.bool) for part in parts]
    return batch([*parts], filler), batch(own, False)
