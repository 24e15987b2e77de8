"""Schedules of the choice of experts on CUDA; all give the same bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How programs share the rows; it changes no bit."""

    rows: int
    """Rows of a program; a power of two."""
    warps: int


ALL = (
    Schedule(1, 1),
    Schedule(4, 2),
    Schedule(4, 4),
    Schedule(16, 4),
    Schedule(32, 8),
    Schedule(1, 4),
)

MOST_HELD = 32
"""Logits of a thread. With twice as many the compiler took minutes."""

FEW = 512
"""Rows up to which a program holds one: many programs are then faster than wide ones."""


def candidates(block: int) -> tuple[Schedule, ...]:
    """Schedules to time and to compare, for `block` experts, a power of two."""
    return tuple(s for s in ALL if s.rows * block <= MOST_HELD * 32 * s.warps)


def pick(rows: int, block: int) -> Schedule:
    """The schedule for `rows` rows of `block` experts, a power of two."""
    if block > 1024:
        return ALL[5]
    if rows <= FEW:
        return ALL[0]
    return ALL[3] if block <= 128 else ALL[2]
