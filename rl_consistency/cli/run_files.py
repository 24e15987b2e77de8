"""The files of a run directory, as commands read them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_consistency.trainers.run_directory.directory import METRICS, require_kinds
from rl_consistency.trainers.run_directory.metrics_file import read_metrics

Rows = Sequence[Mapping[str, Any]]


def load_rows(run_dir: str | os.PathLike[str]) -> Rows:
    """The rows of a run's metrics file; FileNotFoundError without one, ValueError if damaged."""
    require_kinds(Path(run_dir))
    path = run_file(Path(run_dir), METRICS)
    if not (rows := read_metrics(path)):
        raise ValueError(f"{path} is empty: the run ended before its first step")
    return rows


def run_file(run_dir: Path, name: str) -> Path:
    """A file of a run directory; FileNotFoundError, naming what is missing, if it is not there."""
    if not (run_dir / name).is_file():
        missing = f"it has no {name}" if run_dir.is_dir() else "there is no run directory"
        raise FileNotFoundError(f"{run_dir}: {missing}; give the directory a run printed")
    return run_dir / name
