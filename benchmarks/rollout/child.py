"""Processes of their own, each of which answers with a file of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rollout.generation import release_memory

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 900
"""A process that takes longer is killed, with those that it started."""


@dataclass(frozen=True)
class Child:
    """How a process ended."""

    printed: str
    seconds: float
    answer: dict[str, Any]
    """What it wrote, as far as it came."""
    failure: str | None
    """How it failed and the last line that it printed; None where it did not."""

    def require(self) -> Child:
        """Itself; RuntimeError with its last messages where it failed."""
        if self.failure:
            raise RuntimeError(f"{self.failure}\n\n{self.printed[-2000:]}")
        return self


def run_child(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], answer: Path
) -> Child:
    """Run `python arguments` in the clone, once this process holds no memory that it does not
    need. The clone is on the path whatever this process was started with."""
    release_memory()
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {"PYTHONPATH": os.pathsep.join(paths), **environment}
    # `timeout` also ends the processes that an engine started.
    command = ["timeout", "--signal=KILL", str(LONGEST_SECONDS), sys.executable, *arguments]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    seconds, failure = time.perf_counter() - began, None
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        failure = f"{name} ended with status {done.returncode}: {last[:200]}"
    found = json.loads(answer.read_text("utf-8")) if answer.exists() else {}
    return Child(done.stdout, seconds, found, failure)
