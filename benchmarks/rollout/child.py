"""A child process that answers requests, as engine_child.py does, seen from its parent.

Requests and answers are files of JSON in a folder of the child's own; only names of requests go
through its standard input. All it prints goes into a log. So neither side can wait for the other's
pipe, and nothing that a library prints can damage an answer.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.01
LONGEST_LINE = 200
ERROR = re.compile(r"\b\w*(Error|Exception|Killed|error)\b\s*:")
"""Names an error in a line of a log."""
CODE = re.compile(r"^\W*(raise|except|File|Traceback)\b")
"""A line of code that a traceback shows."""


class ChildError(RuntimeError):
    """A child that ended, took too long, or answered nothing readable."""


class Budget:
    """Seconds that all children together may take; None is no limit."""

    def __init__(self, seconds: float | None = None):
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._seconds = seconds

    def within(self, limit: float) -> float:
        """`limit`, or what is left where that is less; ChildError where nothing is."""
        if self._end is None:
            return limit
        left = self._end - time.perf_counter()
        if left <= 0:
            raise ChildError(f"not begun: the {self._seconds:.0f} s of --seconds are over")
        return min(limit, left)


class Child:
    """A running child; as a context it ends with the block, and all processes it started."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ):
        self._folder, self._log, self._asked = folder, log, 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}),
                cwd=cwd,
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ready(self, limit: float) -> dict[str, Any]:
        """What the child says of itself once it is ready; ChildError after `limit` seconds."""
        return self._answer("ready", limit)

    def ask(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """The answer to a request; ChildError where the child fails or takes longer than `limit`
        seconds."""
        name, self._asked = f"request{self._asked}", self._asked + 1
        (self._folder / f"{name}.json").write_text(json.dumps(request), encoding="utf-8")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `_answer` says how
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
        return self._answer(name, limit)

    def stop(self) -> None:
        """End the child and what it started."""
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # a name that it did not read any more
                self._process.stdin.close()

    def _answer(self, name: str, limit: float) -> dict[str, Any]:
        file, until = self._folder / f"{name}.answer.json", time.perf_counter() + limit
        while not file.exists():
            status = self._process.poll()
            if status is not None and not file.exists():
                raise ChildError(f"it ended with status {status}: {last_error(self._log)}")
            if time.perf_counter() > until:
                raise ChildError(
                    f"no answer in {limit:.0f} s; its last line: {last_line(self._log)}"
                )
            time.sleep(POLL_SECONDS)
        text = file.read_text("utf-8", errors="replace")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "seconds" not in found:
            raise ChildError(f"it answered {text[:100]!r}, not JSON with `seconds`")
        return found


def lines(log: Path) -> list[str]:
    """The lines of a log that are not empty."""
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def tail(log: Path, count: int = 30) -> str:
    """The end of a log."""
    return "\n".join(lines(log)[-count:])


def last_line(log: Path) -> str:
    """The last line of a log."""
    found = lines(log)
    return found[-1][:LONGEST_LINE] if found else "(nothing printed)"


def last_error(log: Path) -> str:
    """The first and the last line of a log that name an error; else its last line. A library that
    starts processes reports the cause first, and what came of it last."""
    named = [line for line in lines(log) if ERROR.search(line) and not CODE.search(line)]
    ends = dict.fromkeys((named[0], named[-1])) if named else (last_line(log),)
    return " ... ".join(line[:LONGEST_LINE] for line in ends)
