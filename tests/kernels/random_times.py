"""Times of all schedules at random shapes on an H200, from which expected costs were fitted.

Half of the shapes were fitted, the other half judges: their schedules are known, so a choice among
them is compared without a GPU.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from zlib import crc32

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_random.json"
BANDS = ((1, 16), (17, 128), (129, 1024), (1025, 16384))
"""Numbers of rows by which products are judged."""


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
    def fitted(self):
        """Whether expected costs were fitted to this shape."""
        return crc32(" ".join(map(str, self.shape)).encode()) % 2 == 0

    @property
    def best_us(self):
        return min(self.us.values())


def timed_works(works, schedules):
    """The "products" of "schedules", or the "folds" of "fold_schedules"."""
    found = json.loads(FILE.read_text("utf-8"))
    return [
        Timed(
            shape=tuple(shape),
            library_us=library_us,
            us={n: us for n, us in zip(found[schedules], times, strict=True) if us is not None},
        )
        for *shape, library_us, times in found[works]
    ]


def mean_and_lowest(ratios):
    """Geometric mean and minimum."""
    found = list(ratios)
    return geometric_mean(found), min(found)
