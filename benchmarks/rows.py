"""One measurement, and means over many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Shape = Mapping[str, int | str]

_KINDS: Mapping[str, tuple[type, ...]] = {
    "shape": (int, str),
    "peers": (int, float),
    "peak_bytes": (int, float),
    "tokens_per_second": (int, float),
    "figures": (int, float, str),
    "unavailable": (str,),
}
"""What the values of a row's mappings may be."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Times are medians in microseconds; None where nothing was timed."""

    suite: str
    work: str
    """What was computed, such as `matmul forward`."""
    shape: Shape = field(default_factory=dict)
    dtype: str
    ours_us: float | None = None
    stock_us: float | None = None
    """Time of the fastest of the stock ways."""
    stock: str | None = None
    """Name of the fastest of the stock ways."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """Name to microseconds: public projects, and every stock way where there are several."""
    ratio: float | None = None
    """stock_us / ours_us."""
    ceiling_fraction: float | None = None
    """Time at the measured ceiling (copy bandwidth or large matmul, the slower) / ours_us."""
    schedule: str | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Name to bytes allocated at the peak beyond the operands; `ours`, `stock` and peers."""
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """Further figures by name."""
    error_ratio: float | None = None
    """Our error against fp64 over stock's."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Stock ways and peers that do not run here, and why."""
    error: str | None = None
    """Why there is no measurement."""
    commit: str | None = None
    """What measured it; a suite may be measured in parts."""
    kernels: str | None = None
    """The first digits of its kernels hash."""

    def __post_init__(self) -> None:
        """TypeError on fields of other types, as a file may have them, and OverflowError on numbers
        that no float holds."""
        for name in ("suite", "work", "dtype"):
            if type(value := getattr(self, name)) is not str:
                raise TypeError(f"{name} of a row is {value!r}, and no text")
        for name, kinds in _KINDS.items():
            values = getattr(self, name)
            if not isinstance(values, Mapping):
                raise TypeError(f"{name} of a row is {values!r}, and no mapping")
            for value in values.values():
                if type(value) not in kinds:
                    raise TypeError(f"{name} of a row holds {value!r}")
        for name in ("ours_us", "stock_us", "ratio", "ceiling_fraction", "error_ratio"):
            value = getattr(self, name)
            if value is not None and type(value) not in (int, float):
                raise TypeError(f"{name} of a row is {value!r}, and no number")
            float(value or 0)

    @property
    def case(self) -> str:
        """What was measured, in one line."""
        sizes = (f"{name}={size}" for name, size in self.shape.items())
        return " ".join((f"{self.suite}: {self.work} {self.dtype}", *sizes))


def lacks_memory(why: str) -> bool:
    """Whether a reason in `unavailable` is that the device has too little memory."""
    return "OutOfMemoryError" in why


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None of none, NaN if another is among them."""
    found = list(values)
    if not all(value > 0 for value in found):
        return math.nan
    logs = [math.log(value) for value in found]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def ratios(rows: Sequence[Row]) -> list[float]:
    """Stock time / our time of every row that has it."""
    return [row.ratio for row in rows if row.ratio is not None]
