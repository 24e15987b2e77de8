"""Suites of cases, each of which becomes one row; one JSON file a run, one line a row.

Everything that is measured is reported. A case that raises becomes a row with the error, and the
others go on. The file is written after each case, so a run that is killed keeps what was done.
"""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import torch
import transformers
import triton

from benchmarks.peers import installed
from benchmarks.timing import UNAVAILABLE, Machine
from rl_consistency.kernels.core import findings
from rl_consistency.kernels.core.kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parents[1]
ERRORS = (*UNAVAILABLE, ArithmeticError, LookupError, OSError)

Row = dict[str, Any]
"""`suite`, `work`, `shape` and `dtype` of a case, and what its `run` gave, of which each may be
absent: `ours_us` and `stock_us` (medians; `stock` names the fastest stock way), `ratio` (stock /
ours), `peers` (name -> microseconds), `ceiling_fraction` (time at the measured ceiling of copies or
products / ours), `peak_bytes`, `tokens_per_second`, `figures`, `schedule`, `unavailable` (name ->
why it does not run here), or `error`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the command line asks for in place of what a suite measures by itself."""

    tiny: bool = False
    """Tiny shapes, which run on a CPU."""
    seed: int | None = None
    """Draws shapes that no table has seen."""
    models: Sequence[str] = ()
    vllm: Path | None = None
    """A site-packages folder with vLLM."""
    against: Sequence[str] = ()
    """Modes of vLLM."""
    quick: bool = False
    """Fewer runs, and shorter completions where the longest take minutes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured."""

    work: str
    shape: Mapping[str, Any]
    run: Callable[[Machine], dict[str, Any]]
    """Makes the operands, measures, and gives the other fields of the row."""


Suites = Mapping[str, Sequence[Case]]


@contextmanager
def shipped_findings(device: torch.device) -> Iterator[None]:
    """Inside the block a device knows what is shipped, and nothing that its user tuned."""
    with patch.dict(findings._by_device, {device: findings.Findings(None, {})}):
        findings.forget_picks()
        yield
    findings.forget_picks()


def cases(
    work: str, run: Callable[..., dict[str, Any]], sizes: Iterable[Mapping[str, Any]]
) -> list[Case]:
    """A case of each size; `run` takes the machine, and the sizes by name."""
    return [Case(work=work, shape=size, run=partial(run, **size)) for size in sizes]


def measure(
    suites: Suites,
    machine: Machine,
    meta: Mapping[str, Any],
    write: Callable[[Any], None] | None = None,
) -> list[Row]:
    """All rows. Prints a line a row, and writes them after each case."""
    rows: list[Row] = []
    for suite, suite_cases in suites.items():
        for case in suite_cases:
            rows.append(_measured(suite, case, machine))
            print(_line(rows[-1]), flush=True)
            if write is not None:
                write({"meta": meta, "rows": rows})
    return rows


def _measured(suite: str, case: Case, machine: Machine) -> Row:
    """One case's row; what the case raised is the row's error."""
    row = {"suite": suite, "work": case.work, "shape": dict(case.shape), "dtype": "bfloat16"}
    try:
        found = case.run(machine)
    except ERRORS as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:500]}
    return row | {name: value for name, value in found.items() if value not in (None, {})}


def _line(row: Row) -> str:
    """A row in one line."""
    sizes = " ".join(f"{name}={size}" for name, size in row["shape"].items())
    parts = [f"{row['suite']}: {row['work']} {sizes}"]
    parts += [f"{row['ours_us']:.1f} us"] if "ours_us" in row else []
    parts += [f"{row['ratio']:.3f} against {row['stock']}"] if "ratio" in row else []
    parts += [f"{us / row['ours_us']:.3f} {name}" for name, us in row.get("peers", {}).items()]
    parts += [f"{row['ceiling_fraction']:.2f} of the ceiling"] if "ceiling_fraction" in row else []
    parts += [f"{n} {v:.4g}" for n, v in row.get("figures", {}).items() if isinstance(v, float)]
    parts += [f"{name}: {why}" for name, why in row.get("unavailable", {}).items()]
    return ", ".join([*parts, *([f"ERROR {row['error']}"] if "error" in row else [])])


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The geometric mean and the lowest of stock / ours, over the rows of a suite that have it."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if not ratios or not all(ratio > 0 and math.isfinite(ratio) for ratio in ratios):
        return {}
    return {"cases": len(ratios), "mean": geometric_mean(ratios), "lowest": min(ratios)}


def run_meta(machine: Machine, command: str, commit: str | None = None) -> dict[str, Any]:
    """What a run is recorded with: device, clocks, versions, commit, kernels hash, command."""
    found: dict[str, Any] = {"device": str(machine.device)}
    if machine.cuda:
        clocks = "--query-gpu=clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
        found["device"] = torch.cuda.get_device_name(machine.device)
        found["clocks"] = _output("nvidia-smi", clocks, "--format=csv,noheader").splitlines()[:1]
    ceilings = {"copy_bandwidth": machine.copy_bandwidth, "matmul_rate": machine.matmul_rate}
    return {**found, "ceilings": ceilings, **code_meta(command, commit)}


def code_meta(command: str, commit: str | None = None) -> dict[str, Any]:
    """Versions, commit ("unknown" without git, `-dirty` where code differs from it), kernels hash
    and command."""
    if commit is None and (ROOT / ".git").exists():
        code = ("kernels", "rl_consistency", "trainers")
        dirty = "-dirty" if _output("git", "status", "--porcelain", "--", *code) else ""
        commit = _output("git", "rev-parse", "HEAD") + dirty
    return {
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, triton, transformers)},
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **installed(),
        },
        "commit": commit or "unknown",
        "kernels_sha256": kernels_hash(),
        "command": command,
    }


def _output(command: str, *arguments: str) -> str:
    """What a command prints in the clone; nothing where it is absent or fails."""
    if shutil.which(command) is None:
        return ""
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
