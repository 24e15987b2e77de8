"""Suites of cases, each of which becomes one row of a results file.

Everything that is measured is reported, missed bars included. A case that raises becomes a row with
the error; the other cases go on. The file is written after each case, so a run that is killed
keeps the cases that were done.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import triton
from torch import Tensor

from benchmarks.peers import installed
from benchmarks.results import ALL, Part, Results, save
from benchmarks.rows import Row, Shape, ratios
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


Suites = Mapping[str, Sequence[Case]]
"""Name -> cases that are measured and kept together."""


def cases(
    work: str, run: Callable[..., dict[str, Any]], sizes: Iterable[dict[str, Any]]
) -> list[Case]:
    """A case of each size; `run` takes the machine, and the sizes by name."""
    return [Case(work=work, shape=size, run=partial(run, **size)) for size in sizes]


def of_seed(seed: int, suites: Suites) -> Suites:
    """Suites of shapes drawn by a seed: under names of their own, with the seed in each shape."""
    return {
        f"{name}_random": [replace(case, shape={"seed": seed, **case.shape}) for case in found]
        for name, found in suites.items()
    }


def normal(bench: Machine, *shape: int) -> Tensor:
    """Normal values in bf16 on the device under test."""
    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)


def gradients(
    forward: Callable[[], Any], leaves: Sequence[Tensor], cotangent: Callable[[Tensor], Tensor]
) -> Callable[[], object]:
    """The gradients of the leaves, from one graph that the first call makes."""
    made: list[Any] = []

    def run() -> object:
        if not made:
            found = forward()
            outputs = found if isinstance(found, tuple) else (found,)
            made.extend((outputs, [cotangent(y) for y in outputs]))
        return torch.autograd.grad(made[0], leaves, made[1], retain_graph=True)

    return run


def measure(
    suites: Suites, machine: Machine, results: Results, meta: Mapping[str, Any],
    file: Path | None = None, only: Part = ALL,
) -> Results:  # fmt: skip
    """Results with the suites in them; `meta` is that of `run_meta`, `only` that of `merged`.
    Saves after each case: a run that ends early keeps what it has, and the rows it found of the
    cases that it did not reach."""
    for suite, suite_cases in suites.items():
        clocks, started, before = _clocks(), time.perf_counter(), results
        # Of several models, a suite may have cases of some alone.
        part = {
            name: [value for value in values if any(c.shape[name] == value for c in suite_cases)]
            for name, values in only.items()
        }
        rows: list[Row] = []
        for case in suite_cases:
            row = measured(suite, case, machine)
            rows.append(replace(row, commit=meta["commit"], kernels=meta["kernels_sha256"][:12]))
            all_rows = [*rows, *_rows_of(suite_cases[len(rows) :], before.of(suite))]
            errors = sum(row.error is not None for row in all_rows)
            done = len(all_rows) == len(suite_cases)
            record = {key: meta[key] for key in ("commit", "kernels_sha256", "command", "date")} | {
                "ceilings": asdict(machine.ceilings),
                "clocks": [clocks, _clocks() if len(rows) == len(suite_cases) else None],
                "seconds": time.perf_counter() - started,
                "cases": len(all_rows),
                "older": len(all_rows) - len(rows),
                "errors": errors,
                "complete": done and not errors,
            }
            results = before.merged(suite, all_rows, meta, record, only=part)
            if file is not None:
                save(file, results)
        errors = sum(row.error is not None for row in rows)
        text = f"{suite}: {len(rows)} cases, {errors} errors, {time.perf_counter() - started:.0f} s"
        if found := ratios(rows):
            text += f", stock/ours lowest {min(found):.3f}, median {median(found):.3f}"
        print(text, flush=True)
    return results


def _rows_of(suite_cases: Sequence[Case], rows: Iterable[Row]) -> list[Row]:
    """The rows of these cases, of those that have one."""
    by_case = {(row.work, *row.shape.items(), row.dtype): row for row in rows}
    keys = [(case.work, *case.shape.items(), case.dtype) for case in suite_cases]
    return [by_case[key] for key in keys if key in by_case]


def measured(suite: str, case: Case, machine: Machine) -> Row:
    """One case's row; what the case raised is the row's error.

    This is the only place where an error of an op is held: a bench of hundreds of shapes reports
    the one that fails and measures the others. OSError where the device is lost.
    """
    fields = {"suite": suite, "work": case.work, "shape": case.shape, "dtype": case.dtype}
    try:
        return Row(**fields, **case.run(machine))
    except ERRORS as error:
        row = Row(**fields, error=f"{type(error).__name__}: {error}"[:500])
        print(f"{row.case}: {row.error}", file=sys.stderr, flush=True)
        if any(text in str(error) for text in LOST):
            raise OSError(f"the GPU no longer answers after {row.case}: {row.error}") from error
        return row


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
    """The commit of the clone, `-dirty` where code differs from it; "unknown" without git."""
    if not (ROOT / ".git").exists() or not (commit := _output("git", "rev-parse", "HEAD")):
        return "unknown"
    code = ("kernels", "rl_consistency", "trainers")
    return commit + ("-dirty" if _output("git", "status", "--porcelain", "--", *code) else "")


def _clocks() -> str | None:
    """Clocks, power and temperature as the driver reports them; None without its tool."""
    output = _output("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _output(command: str, *arguments: str) -> str:
    """What a command prints in the clone; nothing where it is absent or fails."""
    if shutil.which(command) is None:
        return ""
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
