"""Which sequences of a decode step stand side by side because their first keys are the same.

The samples of a prompt hold its cache blocks together, and so do prompts with an equal beginning.
Attention reads the keys of such a run once. All of that is a schedule: it moves no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl_consistency.kernels.attention.layout import MOST_SHARERS, SHARED_BLOCK, SharedRun

LEAST_SHARE = 8
"""A step shares keys if one in so many need not be read again; else it is not worth a graph."""

Arrangement = tuple[list[int], list[SharedRun]]
"""An order of sequences, and the runs among them in that order, the largest first."""


def most_runs(sequences: int) -> int:
    """Runs that a call of so many sequences has room for: groups of four fill it."""
    return -(-sequences // 4)


def arranged(
    tables: NDArray[np.int32], pasts: NDArray[np.int64], block_size: int
) -> Arrangement | None:
    """The arrangement that shares most keys; None where too few are shared.

    `tables` [n, width] are the sequences' cache blocks, entered as far as the `pasts` [n] reach:
    the keys before each sequence's queries. Only those are shared.
    """
    width = int(pasts.max(initial=0)) // block_size
    if len(pasts) < 2 or width == 0:
        return None
    # Rows that begin alike are neighbours when rows are sorted as bytes.
    rows = np.ascontiguousarray(tables[:, :width])
    order = np.argsort(rows.view(f"V{rows.itemsize * width}")[:, 0], kind="stable")
    rows, reach = rows[order], pasts[order]
    differ = rows[1:] != rows[:-1]
    equal = np.where(differ.any(axis=1), differ.argmax(axis=1), width) * block_size
    equal = np.minimum(equal, np.minimum(reach[1:], reach[:-1])) // SHARED_BLOCK * SHARED_BLOCK
    runs = sorted(_cut(_best(equal.tolist())), key=_saved, reverse=True)[: most_runs(len(pasts))]
    if sum(map(_saved, runs)) * LEAST_SHARE < max(int(pasts.sum()), 1):
        return None
    return order.tolist(), runs


def _saved(run: SharedRun) -> int:
    """Keys that need not be read again."""
    return (run.count - 1) * run.keys


def _best(equal: Sequence[int]) -> list[SharedRun]:
    """Runs of n + 1 neighbours of which number i and i + 1 share equal[i] keys.

    Neighbours are joined, those that share most first; what is joined is one run where that saves
    more than its parts do.
    """
    # For each stretch: its other end, what it saves, its runs.
    ends: dict[int, tuple[int, int, tuple[SharedRun, ...]]]
    ends = {i: (i, 0, ()) for i in range(len(equal) + 1)}
    firsts = {i: i for i in ends}
    for i in sorted(range(len(equal)), key=equal.__getitem__, reverse=True):
        if equal[i] == 0:
            break
        first = firsts[i]
        _, left, left_runs = ends[first]
        last, right, right_runs = ends[i + 1]
        whole = SharedRun(first, last - first + 1, equal[i])
        if (saved := _saved(whole)) >= left + right:
            ends[first] = last, saved, (whole,)
        else:
            ends[first] = last, left + right, (*left_runs, *right_runs)
        del ends[i + 1], firsts[i]
        firsts[last] = first
    return [run for _, _, runs in ends.values() for run in runs]


def _cut(runs: Sequence[SharedRun]) -> list[SharedRun]:
    """The runs in as few parts of at most `MOST_SHARERS` sequences, about equally large."""
    found: list[SharedRun] = []
    for run in runs:
        parts = -(-run.count // MOST_SHARERS)
        borders = [run.first + run.count * part // parts for part in range(parts + 1)]
        found += [SharedRun(a, b - a, run.keys) for a, b in pairwise(borders)]
    return found
