"""The metrics file: what a step measured, as plain numbers and digests."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from rl_consistency.trainers.run_directory.rows_file import RowsFile, read_rows

Metric = float | int | bool | str
Metrics = Mapping[str, Metric]

LARGEST = 1e50
"""Beyond float32; what is larger cannot be summed up and drawn."""
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsFile(RowsFile):
    """A row is flat, and holds numbers and digests.

    JSON has no NaN: non-finite numbers are written as the strings "nan", "inf" and "-inf", which
    `read_metrics` turns back.
    """

    def log(self, step: int, row: Metrics) -> None:
        """Append the metrics of a step. ValueError also on one beyond `LARGEST`; TypeError on what
        is neither a number nor the text of a digest."""
        _check(row)
        super().log(step, _plain(row))


def _plain(metrics: Metrics) -> dict[str, Metric]:
    floats = {k: float(v) for k, v in metrics.items() if isinstance(v, float)}
    return {**metrics, **{k: str(v) for k, v in floats.items() if not math.isfinite(v)}}


def _check(metrics: Mapping[str, Any]) -> None:
    """TypeError or ValueError, naming it, where a metric is none."""
    for name, value in metrics.items():
        if isinstance(value, str) and name.endswith("digest"):
            continue
        if not isinstance(value, int | float):
            raise TypeError(
                f"metric {name!r} must be a plain number (.item() of a tensor) or the text of a "
                f"digest, got {type(value).__name__}"
            )
        if LARGEST < abs(value) < math.inf:
            raise ValueError(f"metric {name!r} is beyond {LARGEST:g}")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All steps of a metrics file, in order; ValueError, naming file and line, on a damaged one."""
    return read_rows(path, _read)


def _read(row: dict[str, Any]) -> None:
    texts = {k: v for k, v in row.items() if isinstance(v, str)}
    row |= {k: _NONFINITE[v] for k, v in texts.items() if v in _NONFINITE}
    _check(row)
