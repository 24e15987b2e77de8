"""Runs of sequences whose first keys lie in the same blocks of a paged cache.

Decode may then read these keys once for a run. That is a schedule: it moves no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_consistency.kernels.core.grid import cdiv

MOST_SHARERS = 8
"""Most sequences of a run; a larger group makes several runs."""
SHARED_BLOCK = 128
"""Shared keys are read once in whole blocks of so many; the rest of them by each sequence."""


@dataclass(frozen=True)
class SharedRun:
    """Consecutive sequences of a call that share keys. Example: SharedRun(4, 8, 2048) says that the
    first 2,048 keys of sequences 4 to 11 lie in the same blocks."""

    first: int
    count: int  # sequences, 2 to `MOST_SHARERS`
    keys: int
    """Number of shared keys; all stand before the first query of each sequence."""


@dataclass(frozen=True, eq=False)
class SharedTables:
    """The runs of a call as int32 tensors on a GPU."""

    runs: Tensor
    """[runs, 3]: first sequence, number of sequences, keys; 0 keys where there is no run."""
    keys: Tensor
    """[sequences]: the keys that each shares with its run."""


def shared_arrays(
    runs: Sequence[SharedRun], most: int, sequences: int
) -> tuple[list[list[int]], list[int]]:
    """`SharedTables` as lists, filled up to `most` runs."""
    rows = [[run.first, run.count, run.keys] for run in runs]
    keys = [0] * sequences
    for run in runs:
        keys[run.first : run.first + run.count] = [run.keys] * run.count
    return rows + [[0, 0, 0]] * (most - len(runs)), keys


def check_runs(
    runs: Sequence[SharedRun],
    starts: Sequence[int],
    lens: Sequence[int],
    contexts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    """ValueError unless every run says what is true of the sequences of a paged layout."""
    seen: set[int] = set()
    for run in runs:
        members = range(run.first, run.first + run.count)
        if not (2 <= run.count <= MOST_SHARERS and 0 <= run.first <= len(starts) - run.count):
            raise ValueError(
                f"paged attention: {run} in a call of {len(starts)} sequences; a run has 2 to "
                f"{MOST_SHARERS} of them."
            )
        if not seen.isdisjoint(members):
            raise ValueError(f"paged attention: a sequence of {run} is in another run too.")
        seen.update(members)
        past = min(contexts[i] - lens[i] for i in members)
        if not 0 < run.keys <= past:
            raise ValueError(
                f"paged attention: {run}, but one of its sequences has {past} keys before its "
                "queries; all shared keys stand before them, and there is at least one."
            )
        blocks = cdiv(run.keys, block_size)
        if any(tables[i][:blocks] != tables[run.first][:blocks] for i in members):
            raise ValueError(
                f"paged attention: {run}, but the first {blocks} blocks of its sequences are not "
                "the same ones."
            )
    if runs and any(starts[i] + lens[i] > starts[i + 1] for i in range(len(starts) - 1)):
        raise ValueError(
            "paged attention: where sequences share keys, the queries stand in their order."
        )
