"""Times of all schedules at random shapes on an H200, from which expected costs were fitted.

Half of the shapes were fitted, the other half judges: their schedules are known, so a choice among
them is compared without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from zlib import crc32

FILE = Path(__file__).with_name("random_h200.json")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Microseconds of every schedule at one shape."""

    shape: tuple[Any, ...]
    """Layout, m, n and k of a product; tokens, n and k of a fold."""
    library_us: float
    """The vendor's product; of a fold, and the addition to the gradient."""
    us: dict[str, float]
    """Name of the schedule -> its time."""

    @property
    def fitted(self) -> bool:
        """Whether expected costs were fitted to this shape."""
        return crc32(" ".join(map(str, self.shape)).encode()) % 2 == 0

    @property
    def best_us(self) -> float:
        """The time of the fastest schedule."""
        return min(self.us.values())


def timed_products(file: Path = FILE) -> list[Timed]:
    """The products of the file."""
    return _read(file, "products", "schedules")


def timed_folds(file: Path = FILE) -> list[Timed]:
    """The gradient folds of the file."""
    return _read(file, "folds", "fold_schedules")


def mean_and_lowest(ratios: Iterable[float]) -> tuple[float, float]:
    """Geometric mean and minimum."""
    found = list(ratios)
    return geometric_mean(found), min(found)


def _read(file: Path, works: str, schedules: str) -> list[Timed]:
    found = json.loads(file.read_text(encoding="utf-8"))
    names = found[schedules]
    return [
        Timed(
            shape=tuple(shape),
            library_us=library_us,
            us={name: us for name, us in zip(names, times, strict=True) if us is not None},
        )
        for *shape, library_us, times in found[works]
    ]
