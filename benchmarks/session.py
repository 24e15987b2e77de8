"""Runs suites one after another and keeps what they gave in a results file.

Everything that is measured is reported, missed bars included. A case that raises becomes a row with
the error; the other cases go on. The file is written after each suite, so a run that is killed
keeps the suites that were done.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from triton.errors import TritonError

from benchmarks.peers import installed
from benchmarks.results import Results, Row, ratios, save
from benchmarks.suite import Case, OutOfTime, Suite
from benchmarks.timing import Machine
from rl_consistency.kernels.core.kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
LOST = ("illegal memory access", "device-side assert", "unspecified launch failure")
"""Errors after which every further call on the device fails."""


@dataclass
class Session:
    """One run of the command."""

    results: Results
    meta: dict[str, Any]
    """See `run_meta`."""
    file: Path | None = None
    quick: bool = False
    failed: list[str] = field(default_factory=list)
    """Cases that raised."""

    def measure(self, suites: Sequence[Suite], machine: Machine) -> None:
        """Measure the suites; the file is saved after each.

        Raises:
            OSError: the device is lost, or the file cannot be written.
        """
        ceilings = {
            "copy_bandwidth": machine.ceilings.copy_bandwidth,
            "matmul_rate": machine.ceilings.matmul_rate,
        }
        for suite in suites:
            clocks, started = _clocks(), time.perf_counter()
            rows = list(self._rows(suite, machine))
            errors = [row.error for row in rows if row.error is not None]
            run = {key: self.meta[key] for key in ("commit", "kernels_sha256", "command", "date")}
            record = run | {
                "ceilings": ceilings,
                "clocks": [clocks, _clocks()],
                "seconds": time.perf_counter() - started,
                "cases": len(suite.cases),
                "errors": len(errors),
                "quick": self.quick,
                "complete": not self.quick and not errors and len(rows) == len(suite.cases),
            }
            self.results = self.results.merged(suite.name, rows, self.meta, record)
            if self.file is not None:
                save(self.file, self.results)
            print(suite_line(suite.name, rows, record), flush=True)
            if errors and _is_lost(errors[-1]):
                raise OSError(f"the GPU no longer answers after: {errors[-1]}")

    def _rows(self, suite: Suite, machine: Machine) -> Iterator[Row]:
        for case in suite.cases:
            if machine.deadline is not None and time.perf_counter() > machine.deadline:
                return
            try:
                row = measured(suite.name, case, machine)
            except OutOfTime:
                return
            yield row
            if row.error is not None:
                self.failed.append(f"{suite.name}: {case.name}")
                print(f"{self.failed[-1]}: {row.error}", file=sys.stderr, flush=True)
                if _is_lost(row.error):
                    return


def measured(suite: str, case: Case, machine: Machine) -> Row:
    """One case's row; what the case raised is the row's error. `OutOfTime` passes.

    This is the only place where an error of an op is held: a bench of hundreds of shapes reports
    the one that fails and measures the others.
    """
    fields = {"suite": suite, "work": case.work, "shape": case.shape, "dtype": case.dtype}
    try:
        return Row(**fields, **case.run(machine))
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TritonError,
        TypeError,
        ValueError,
    ) as error:
        return Row(**fields, error=f"{type(error).__name__}: {error}"[:500])


def _is_lost(error: str) -> bool:
    return any(text in error for text in LOST)


def suite_line(name: str, rows: Sequence[Row], record: dict[str, Any]) -> str:
    """One line about a suite: rows, lowest and middle ratio, seconds."""
    text = f"{name}: {len(rows)} of {record['cases']} cases, {record['errors']} errors"
    if found := sorted(ratios(rows)):
        text += f", stock/ours lowest {found[0]:.3f}, median {found[len(found) // 2]:.3f}"
    return f"{text}, {record['seconds']:.0f} s"


def bar_lines(results: Results) -> Iterator[str]:
    """Every bar that has a figure, and whether it is met."""
    for bar in results.bars.values():
        if bar["figure"] is not None:
            verdict = "met" if bar["met"] else "missed" if bar["complete"] else "incomplete"
            target = f"{bar['sign']} {bar['bar']:.2f}"
            yield f"{verdict:10} {bar['figure']:8.3f} {target:>8}  {bar['what']}"


def run_meta(device: torch.device, command: str, commit: str | None = None) -> dict[str, Any]:
    """What a run is recorded with: device, versions, commit, kernels hash, command, date."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else "",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            **installed(),
        },
        "commit": commit or checked_out(),
        "kernels_sha256": kernels_hash(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command as it can be typed again."""
    return f"python -m benchmarks {shlex.join(arguments)}"


def checked_out() -> str:
    """The commit of the clone, `-dirty` where files differ from it; "unknown" without git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return "unknown"

    def output(*command: str) -> str:
        done = subprocess.run([git, "-C", ROOT, *command], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = output("status", "--porcelain", "--", "kernels", "rl_consistency", "trainers")
    return (output("rev-parse", "HEAD") or "unknown") + ("-dirty" if changed else "")


def _clocks() -> str | None:
    """Clocks, power and temperature as the driver reports them; None without its tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
