"""Schedules of the choice of experts on CUDA; all give the same bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How programs share the rows; it changes no bit."""

    rows: int
    """Rows of a program; a power of two."""
    warps: int


CANDIDATES = (Schedule(1, 1), Schedule(4, 2), Schedule(4, 4), Schedule(16, 4), Schedule(32, 8))
"""Schedules to time and to compare."""

FEW = 512
"""Rows up to which a program holds one: many programs are then faster than wide ones."""


def pick(rows: int, block: int) -> Schedule:
    """The schedule for `rows` rows of `block` experts, a power of two."""
    if rows <= FEW or block > 1024:
        return CANDIDATES[0]
    return CANDIDATES[3] if block <= 128 else CANDIDATES[2]
