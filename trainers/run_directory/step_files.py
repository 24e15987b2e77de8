"""What a run writes of every step: metrics, digests, sample completions; and of all, a summary.

Each file has one JSON object per line and step, and survives a kill of the run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.numerics.strict import current
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.foreign_files import parse_json_object
from rl_consistency.trainers.run_directory.directory import (
    CHANGES,
    DIGESTS,
    METRICS,
    SAMPLES,
    require_kinds,
)
from rl_consistency.trainers.run_directory.manifest import State, put_on_list, state_of, write_own


class RowsFile:
    """One JSON object per line and step, on disk before `log` returns.

    `resume_from` is the `state` that the checkpoint a run continues from has kept: what was written
    after it is cut off.

    Raises:
        FileExistsError: the file holds lines and the run does not resume.
        ValueError: the run resumes and the file does not begin as it did then.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume_from: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path = Path(path)
        self._last_step, kept = -1, b""
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_from is not None:
            # A new file, since another run directory may hold a hard link to the old one.
            kept = kept_rows(path, resume_from)
            write_own(path, kept)
            self._last_step = max((row["step"] for row in read_rows(path)), default=-1)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} holds a run: resume that run or choose another folder")
        else:
            put_on_list(path.parent, {path.name: [state_of(b"")]})
        self._bytes, self._hash = len(kept), hashlib.sha256(kept)
        self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def state(self) -> State:
        """What `resume_from` needs to continue from here: the length and SHA-256 of the file."""
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Append one line; a full disk (OSError) leaves the file as it was.

        ValueError unless steps ascend and `row` has no "step".
        """
        log_rows(step, {self: row})

    def line(self, step: int, row: Mapping[str, Any]) -> bytes:
        """The line of a row; errors of `log`."""
        if step <= self._last_step:
            raise ValueError(f"step {step} follows step {self._last_step}; steps must ascend")
        if "step" in row:
            raise ValueError("a row must not hold 'step': it is the first argument of log")
        return json.dumps({"step": step, **row}, allow_nan=False).encode() + b"\n"

    def states(self, line: bytes) -> list[State]:
        """The states of the file before and after this line."""
        after = self._hash.copy()
        after.update(line)
        return [self.state(), {"bytes": self._bytes + len(line), "sha256": after.hexdigest()}]

    def append(self, step: int, line: bytes) -> None:
        """Write what `line` gave for a step."""
        start = self._stream.seek(0, os.SEEK_END)
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._stream.name)
            os.fsync(self._stream.fileno())
        except OSError:
            self._stream.truncate(start)
            raise
        self._last_step = step
        self._bytes += len(line)
        self._hash.update(line)

    def close(self) -> None:
        self._stream.close()


def log_rows(step: int, rows: Mapping[RowsFile, Mapping[str, Any]]) -> None:
    """Append the rows of a step, each to its file, all in one directory; errors of `RowsFile.log`,
    before anything is written where they are not of the disk."""
    lines = {file: file.line(step, row) for file, row in rows.items()}
    if lines:
        states = {file.path.name: file.states(line) for file, line in lines.items()}
        put_on_list(next(iter(lines)).path.parent, states)
    for file, line in lines.items():
        file.append(step, line)


def read_rows(
    path: str | os.PathLike[str], check: Callable[[dict[str, Any]], None] = lambda row: None
) -> list[dict[str, Any]]:
    """All rows of such a file, in order; ValueError, naming file and line, on a damaged one.

    `check` raises ValueError or TypeError on a row that is none of its file's.
    """
    path, rows, last_step = Path(path), [], -1
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = parse_json_object(line)
            check(row)
        except (ValueError, TypeError) as error:
            remedy = "repair or delete it"
            if not line.endswith(b"\n"):
                remedy = "a kill left it unfinished; resume the run, which drops it, or delete it"
            raise ValueError(f"{path}, line {number}: {error}: {remedy}") from error
        step = row.get("step")
        if type(step) is not int or step <= last_step or not line.endswith(b"\n"):
            needed = 'a whole line is needed, a JSON object with an ascending integer "step"'
            raise ValueError(f"{path}, line {number}, is no row after step {last_step}: {needed}")
        rows.append(row)
        last_step = step
    return rows


def kept_rows(path: Path, state: Mapping[str, Any]) -> bytes:
    """What the file held at `state`; ValueError if those bytes are not the ones of then."""
    data = path.read_bytes() if path.is_file() else b""
    kept = data[: state["bytes"]]
    if state_of(kept) != state:
        raise ValueError(
            f"{path} is missing or damaged: its first {state['bytes']} bytes are not those of then "
            "(SHA-256). Restore it, or start a new run with the checkpoint as policy.path."
        )
    return kept


Metric = float | int | bool | str
Metrics = Mapping[str, Metric]

LARGEST = 1e50
"""Beyond float32; what is larger cannot be summed up and drawn."""


class MetricsFile(RowsFile):
    """A row is flat, and holds numbers and digests.

    JSON has no NaN: non-finite numbers are written as the strings "nan", "inf" and "-inf", which
    `read_metrics` turns back.
    """

    def line(self, step: int, row: Metrics) -> bytes:
        """The line of a row. ValueError also on a metric beyond `LARGEST`; TypeError on what is
        neither a number nor the text of a digest."""
        _check_metrics(row)
        return super().line(step, plain(row))


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its non-finite numbers as texts."""
    floats = {name: float(value) for name, value in row.items() if isinstance(value, float)}
    return {**row, **{name: str(v) for name, v in floats.items() if not math.isfinite(v)}}


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    """TypeError or ValueError, naming it, where a metric is none."""
    for name, value in metrics.items():
        if isinstance(value, str) and name.endswith("digest"):
            continue
        if not isinstance(value, int | float):
            wanted = "a number (.item() of a tensor) or a digest's text"
            raise TypeError(f"metric {name!r} must be {wanted}, got {type(value).__name__}")
        if LARGEST < abs(value) < math.inf:
            raise ValueError(f"metric {name!r} is beyond {LARGEST:g}")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All steps of a metrics file, in order; ValueError, naming file and line, on a damaged one."""

    def check(row: dict[str, Any]) -> None:
        texts = {k: v for k, v in row.items() if isinstance(v, str)}
        row |= {k: float(v) for k, v in texts.items() if v in ("nan", "inf", "-inf")}
        _check_metrics(row)

    return read_rows(path, check)


Digests = Mapping[str, str | Mapping[str, str]]
"""Quantity -> digest, or name -> digest where it has parts; in the order of their making."""


class StepFiles:
    """`metrics.jsonl`, `digests.jsonl` and `samples.jsonl` of a run directory, as one tracker.

    `take_digests` gives those of the step whose metrics are logged, once; {} if there are none.
    `samples` gives its completions that people are shown; may be empty.
    `changes` of the recipe, each with `key`, `old` and `new`, hold from the next step on; a run
    that has some keeps them in `changes.jsonl`.
    `resume_from` and errors are those of `RowsFile`; a refusal leaves all files as they were.
    """

    def __init__(
        self,
        directory: Path,
        resume_from: Mapping[str, Any] | None,
        take_digests: Callable[[], Digests],
        samples: Callable[[], Sequence[Mapping[str, Any]]] = list,
        changes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._take_digests, self._shown, self._changes = take_digests, samples, changes
        states, kinds = dict(resume_from or {}), {DIGESTS: RowsFile, SAMPLES: RowsFile}
        if changes or (resume_from is not None and (directory / CHANGES).exists()):
            states.setdefault(CHANGES, state_of(b""))
        if CHANGES in states:
            kinds[CHANGES] = RowsFile
        for name, state in states.items():
            kept_rows(directory / name, state)
        # Metrics last: a step that has them has its digests too.
        self._files = {
            name: kind(directory / name, resume_from=states.get(name))
            for name, kind in {**kinds, METRICS: MetricsFile}.items()
        }

    def state(self) -> dict[str, Any]:
        """What `resume_from` needs to continue from here."""
        return {name: file.state() for name, file in self._files.items()}

    def log(self, step: int, metrics: Metrics) -> None:
        rows: dict[str, Mapping[str, Any]] = {}
        if digests := self._take_digests():
            rows[DIGESTS] = digests
        if samples := self._shown():
            rows[SAMPLES] = {"samples": samples}
        if self._changes:
            rows[CHANGES], self._changes = {"changes": [*self._changes]}, ()
        rows[METRICS] = metrics
        log_rows(step, {self._files[name]: row for name, row in rows.items()})

    def close(self, *, failed: bool = False) -> None:
        for file in self._files.values():
            file.close()


def read_digests(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All steps of a digests file, in order; ValueError, naming file and line, on a damaged one."""

    def check(row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            texts = value.values() if isinstance(value, dict) else [value]
            if name != "step" and not all(isinstance(text, str) for text in texts):
                raise TypeError(f"{name!r} is neither a digest nor an object of digests")

    return read_rows(path, check)


def read_changes(run_dir: Path) -> list[tuple[int, str, Any, Any]]:
    """Step, key, old and new value of what was changed in the recipe where a run was resumed; the
    new one holds from that step on. ValueError, naming file and line, on a damaged file."""

    def check(row: Mapping[str, Any]) -> None:
        found = row.get("changes")
        for change in found if isinstance(found, list) else [None]:
            if not (isinstance(change, dict) and {"key", "old", "new"} <= change.keys()):
                raise TypeError('"changes" must be a list of objects with key, old and new')

    rows = read_rows(file, check) if (file := run_dir / CHANGES).is_file() else []
    return [(row["step"], c["key"], c["old"], c["new"]) for row in rows for c in row["changes"]]


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


SUMMARY_STEPS = 5
"""Most steps at either end of a run whose mean reward the summary shows; never one at both."""


def summary_of(rows: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of all steps' metrics: rewards at both ends, median speeds; `totals` of the hook."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    ends = min(SUMMARY_STEPS, max(len(rewards) // 2, 1))
    evaluations = [row["eval/reward"] for row in rows if "eval/reward" in row] or [None]
    speeds = {}
    for path in ("rollout", "training", "stock_rollout", "stock_training"):
        name = f"time/{path}_tokens_per_second"
        if values := [row[name] for row in rows if name in row]:
            # The first measurement compiles kernels.
            speeds[name] = round(median(values[1:] or values), 1)
    return {
        "reward/first": fmean(rewards[:ends]) if rewards else None,
        "reward/last": fmean(rewards[-ends:]) if rewards else None,
        "eval/first": evaluations[0],
        "eval/last": evaluations[-1],
        **totals,
        **speeds,
    }


def passed(summary: Mapping[str, Any]) -> bool:
    """Whether no token, no gradient element, no expert of a token and no value of a critic differed
    over the run."""
    always = ("mismatched_tokens", "gradient_check/mismatched_elements")
    of_some = ("value_check/mismatched_values", "rerouted_tokens")
    found = {**{f"consistency/{name}": 0 for name in of_some}, **summary}
    return not any(found[f"consistency/{name}"] for name in always + of_some)


def write_summary(
    config: RunConfig,
    found: Mapping[str, Any],
    seconds: float,
    processes: int,
    fingerprint: Fingerprint,
) -> dict[str, Any]:
    """Write `summary.json`, all or nothing, and return it: what a run found, under its name, and
    what its bits depend on."""
    consistency = config.consistency
    summary = {
        "name": config.run.name,
        "steps": config.training.steps,
        "seconds": round(seconds, 1),
        **found,
        "strategy": config.training.strategy,
        "processes": processes,
        **consistency.model_dump(mode="json", include={"gradient_leaves", "ordered"}),
        "weights_depend_on_processes": not consistency.ordered and processes > 1,
        "strict": current().as_record(),
        "fingerprint": fingerprint.entries,
    }
    text = json.dumps(plain(summary), indent=2, allow_nan=False)
    write_own(config.run.output_dir / "summary.json", text + "\n")
    return summary
