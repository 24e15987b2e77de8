"""Suites of cases, each of which becomes one row, and a run that keeps them in a results file.

Everything that is measured is reported, missed bars included. A case that raises becomes a row with
the error; the other cases go on. The file is written after each suite, so a run that is killed
keeps the suites that were done.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch import Tensor

from benchmarks.peers import installed
from benchmarks.results import Results, Row, Shape, ratios, save
from benchmarks.timing import UNAVAILABLE, Machine
from rl_consistency.kernels.core.kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
ERRORS = (*UNAVAILABLE, ArithmeticError, LookupError, OSError)
LOST = ("illegal memory access", "device-side assert", "unspecified launch failure")
"""Errors after which every further call on the device fails."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured."""

    work: str
    shape: Shape
    run: Callable[[Machine], dict[str, Any]]
    """Makes the operands, measures, and gives the other fields of the row."""
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Suite:
    """Cases that are measured and kept together."""

    name: str
    cases: Sequence[Case]


def normal(bench: Machine, *shape: int) -> Tensor:
    """Normal values in bf16 on the device under test."""
    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)


@dataclass
class Run:
    """One run of a command: its results so far, and the file that they are merged into."""

    results: Results
    meta: Mapping[str, Any]
    """See `run_meta`."""
    file: Path | None = None
    quick: bool = False

    def measure(self, suites: Sequence[Suite], machine: Machine) -> list[str]:
        """Measure the suites and save the file after each; returns the cases that raised.

        Raises:
            OSError: the device is lost, or the file cannot be written.
        """
        failed = []
        for suite in suites:
            clocks, started, rows, lost = _clocks(), time.perf_counter(), [], False
            errors = 0
            for case in suite.cases:
                rows.append(row := measured(suite.name, case, machine))
                if row.error is not None:
                    sizes = (f"{key}={value}" for key, value in case.shape.items())
                    failed.append(" ".join((f"{suite.name}: {case.work}", *sizes)))
                    print(f"{failed[-1]}: {row.error}", file=sys.stderr, flush=True)
                    errors, lost = errors + 1, any(text in row.error for text in LOST)
                if lost:
                    break
            run = {key: self.meta[key] for key in ("commit", "kernels_sha256", "command", "date")}
            record = run | {
                "ceilings": asdict(machine.ceilings),
                "clocks": [clocks, _clocks()],
                "seconds": time.perf_counter() - started,
                "cases": len(suite.cases),
                "errors": errors,
                "quick": self.quick,
                "complete": not self.quick and not errors,
            }
            self.results = self.results.merged(suite.name, rows, self.meta, record)
            if self.file is not None:
                save(self.file, self.results)
            print(_suite_line(suite.name, rows, record), flush=True)
            if lost:
                raise OSError(f"the GPU no longer answers after: {rows[-1].error}")
        return failed


def measured(suite: str, case: Case, machine: Machine) -> Row:
    """One case's row; what the case raised is the row's error.

    This is the only place where an error of an op is held: a bench of hundreds of shapes reports
    the one that fails and measures the others.
    """
    fields = {"suite": suite, "work": case.work, "shape": case.shape, "dtype": case.dtype}
    try:
        return Row(**fields, **case.run(machine))
    except ERRORS as error:
        return Row(**fields, error=f"{type(error).__name__}: {error}"[:500])


def _suite_line(name: str, rows: Sequence[Row], record: Mapping[str, Any]) -> str:
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
        "commit": commit or _checked_out(),
        "kernels_sha256": kernels_hash(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _checked_out() -> str:
    """The commit of the clone, `-dirty` where files differ from it; "unknown" without git."""
    git = ("git", "-C", str(ROOT))
    if not (ROOT / ".git").exists() or not (commit := _output(*git, "rev-parse", "HEAD")):
        return "unknown"
    code = ("kernels", "rl_consistency", "trainers")
    return commit + ("-dirty" if _output(*git, "status", "--porcelain", "--", *code) else "")


def _clocks() -> str | None:
    """Clocks, power and temperature as the driver reports them; None without its tool."""
    output = _output("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _output(command: str, *arguments: str) -> str:
    """What a command prints; nothing where it is absent or fails."""
    if shutil.which(command) is None:
        return ""
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
