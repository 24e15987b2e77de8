"""The metrics file: one line per step, which survives a kill of the run."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_consistency.trainers.data.foreign_files import parse_json_object
from rl_consistency.trainers.run_directory.unfinished import write_whole

Metric = float | int | bool | str
Metrics = Mapping[str, Metric]

LARGEST = 1e50
"""Beyond float32; what is larger cannot be summed up and drawn."""
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsFile:
    """One JSON object per line and step, on disk before `log` returns.

    JSON has no NaN: non-finite numbers are written as the strings "nan", "inf" and "-inf", which
    `read_metrics` turns back. `resume_from` is the `state` that the checkpoint a run continues from
    has kept: what was written after it is cut off.

    Raises:
        FileExistsError: the file holds lines and the run does not resume.
        ValueError: the run resumes and the file does not begin as it did then.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume_from: Mapping[str, Any] | None = None
    ) -> None:
        self._path = path = Path(path)
        self._last_step = -1
        if resume_from is not None:
            _cut_after(path, resume_from)
            self._last_step = max((row["step"] for row in read_metrics(path)), default=-1)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} holds a run: resume that run or choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def state(self) -> dict[str, Any]:
        """What `resume_from` needs to continue from here: the length and SHA-256 of the file."""
        return _state(self._path.read_bytes())

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one line; a full disk (OSError) leaves the file as it was.

        ValueError unless steps ascend and `metrics` has no "step", and on a metric beyond
        `LARGEST`; TypeError on another wrong metric: only digests are text.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} follows step {self._last_step}; steps must ascend")
        if "step" in metrics:
            raise ValueError("metrics must not hold 'step': it is the first argument of log")
        _check(metrics)
        line = json.dumps(_plain({"step": step, **metrics}), allow_nan=False).encode() + b"\n"
        start = self._stream.seek(0, os.SEEK_END)
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._stream.name)
            os.fsync(self._stream.fileno())
        except OSError:
            self._stream.truncate(start)
            raise
        self._last_step = step

    def close(self, *, failed: bool = False) -> None:
        self._stream.close()


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
    path, rows, last_step = Path(path), [], -1
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = parse_json_object(line)
            texts = {k: v for k, v in row.items() if isinstance(v, str)}
            row |= {k: _NONFINITE[v] for k, v in texts.items() if v in _NONFINITE}
            _check(row)
        except (ValueError, TypeError) as error:
            remedy = "repair or delete it"
            if not line.endswith(b"\n"):
                remedy = "a kill left it unfinished; resume the run, which drops it, or delete it"
            raise ValueError(f"{path}, line {number}: {error}: {remedy}") from error
        step = row.get("step")
        if type(step) is not int or step <= last_step or not line.endswith(b"\n"):
            raise ValueError(
                f"{path}, line {number}, is not the metrics of a step after {last_step}: a whole "
                'line is needed, a JSON object with an ascending integer "step"'
            )
        rows.append(row)
        last_step = step
    return rows


def _cut_after(path: Path, state: Mapping[str, Any]) -> None:
    """Cut to the length of `state`; ValueError if those bytes are not the ones of then."""
    data = path.read_bytes() if path.is_file() else b""
    if _state(data[: state["bytes"]]) != state:
        raise ValueError(
            f"{path} is missing or damaged: its first {state['bytes']} bytes are not those of the "
            "checkpoint to resume from (SHA-256). Restore the file, or start a new run with that "
            "checkpoint as policy.path."
        )
    # A new file, since another run directory may hold a hard link to the old one.
    write_whole(path, data[: state["bytes"]].decode())


def _state(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
