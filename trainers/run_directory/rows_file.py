"""A file with one JSON object per line and step, which survives a kill of the run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_consistency.files.unfinished import write_whole
from rl_consistency.trainers.data.foreign_files import parse_json_object


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
        self._path = path = Path(path)
        self._last_step = -1
        if resume_from is not None:
            # A new file, since another run directory may hold a hard link to the old one.
            write_whole(path, kept_rows(path, resume_from).decode())
            self._last_step = max((row["step"] for row in read_rows(path)), default=-1)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} holds a run: resume that run or choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def state(self) -> dict[str, Any]:
        """What `resume_from` needs to continue from here: the length and SHA-256 of the file."""
        return _state(self._path.read_bytes())

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Append one line; a full disk (OSError) leaves the file as it was.

        ValueError unless steps ascend and `row` has no "step".
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} follows step {self._last_step}; steps must ascend")
        if "step" in row:
            raise ValueError("a row must not hold 'step': it is the first argument of log")
        line = json.dumps({"step": step, **row}, allow_nan=False).encode() + b"\n"
        start = self._stream.seek(0, os.SEEK_END)
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._stream.name)
            os.fsync(self._stream.fileno())
        except OSError:
            self._stream.truncate(start)
            raise
        self._last_step = step

    def close(self) -> None:
        self._stream.close()


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
            raise ValueError(
                f"{path}, line {number}, is not the row of a step after {last_step}: a whole "
                'line is needed, a JSON object with an ascending integer "step"'
            )
        rows.append(row)
        last_step = step
    return rows


def kept_rows(path: Path, state: Mapping[str, Any]) -> bytes:
    """What the file held at `state`; ValueError if those bytes are not the ones of then."""
    data = path.read_bytes() if path.is_file() else b""
    kept = data[: state["bytes"]]
    if _state(kept) != state:
        raise ValueError(
            f"{path} is missing or damaged: its first {state['bytes']} bytes are not those of the "
            "checkpoint to resume from (SHA-256). Restore the file, or start a new run with that "
            "checkpoint as policy.path."
        )
    return kept


def _state(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
