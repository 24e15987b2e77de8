"""What a run writes of every step: metrics, digests of what it made, and sample completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_consistency.trainers.run_directory.directory import DIGESTS, METRICS, SAMPLES
from rl_consistency.trainers.run_directory.metrics_file import Metrics, MetricsFile, read_metrics
from rl_consistency.trainers.run_directory.rows_file import RowsFile, kept_rows, read_rows

Digests = Mapping[str, str | Mapping[str, str]]
"""Quantity -> digest, or name -> digest where it has parts; in the order of their making."""


class StepFiles:
    """`metrics.jsonl`, `digests.jsonl` and `samples.jsonl` of a run directory, as one tracker.

    `take_digests` gives those of the step whose metrics are logged, once; {} if there are none.
    `samples` gives its completions that people are shown; may be empty.
    `resume_from` and errors are those of `RowsFile`; a refusal leaves all files as they were.
    """

    def __init__(
        self,
        directory: Path,
        resume_from: Mapping[str, Any] | None,
        take_digests: Callable[[], Digests],
        samples: Callable[[], Sequence[Mapping[str, Any]]] = list,
    ) -> None:
        self._directory, self._take_digests, self._shown = directory, take_digests, samples
        states = resume_from or {}
        for name, state in states.items():
            kept_rows(directory / name, state)
        self._digests = RowsFile(directory / DIGESTS, resume_from=states.get(DIGESTS))
        self._samples = RowsFile(directory / SAMPLES, resume_from=states.get(SAMPLES))
        self._metrics = MetricsFile(directory / METRICS, resume_from=states.get(METRICS))

    def state(self) -> dict[str, Any]:
        """What `resume_from` needs to continue from here."""
        files = {DIGESTS: self._digests, SAMPLES: self._samples, METRICS: self._metrics}
        return {name: file.state() for name, file in files.items()}

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of all steps so far."""
        return read_metrics(self._directory / METRICS)

    def log(self, step: int, metrics: Metrics) -> None:
        # Metrics last: a step that has them has its digests too.
        if digests := self._take_digests():
            self._digests.log(step, digests)
        if samples := self._shown():
            self._samples.log(step, {"samples": samples})
        self._metrics.log(step, metrics)

    def close(self, *, failed: bool = False) -> None:
        self._metrics.close()
        self._samples.close()
        self._digests.close()


def read_digests(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All steps of a digests file, in order; ValueError, naming file and line, on a damaged one."""
    return read_rows(path, _check)


def _check(row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        texts = value.values() if isinstance(value, dict) else [value]
        if name != "step" and not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name!r} is neither a digest nor an object of digests")
