"""Suites of cases, each of which becomes one row; one JSON file a run, one line a row.

Everything that is measured is reported. A case that raises becomes a row with the error, and the
others go on. The file is written after each case, so a run that is killed keeps what was done.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch as attribute

import torch
import transformers
import triton
from torch import Tensor

from benchmarks.peers import installed
from benchmarks.timing import UNAVAILABLE, Machine
from rl_consistency.cases.case import as_tuple
from rl_consistency.kernels.core import findings
from rl_consistency.kernels.core.findings import Findings
from rl_consistency.kernels.core.kernels_hash import kernels_hash
from rl_consistency.numerics.files import write_output

ROOT = Path(__file__).resolve().parents[1]
ERRORS = (*UNAVAILABLE, ArithmeticError, LookupError, OSError)
LOST = ("illegal memory access", "device-side assert", "unspecified launch failure")
"""Errors after which every further call on the device fails."""

Row = dict[str, Any]
"""`suite`, `work`, `shape` and `dtype` of a case, and what its `run` gave, of which each may be
absent: `ours_us` and `stock_us` (medians; `stock` names the fastest stock way), `ratio` (stock /
ours), `peers` (name -> microseconds), `ceiling_fraction` (time at the measured ceiling of copies or
products / ours), `peak_bytes`, `tokens_per_second`, `figures`, `schedule`, `unavailable` (name ->
why it does not run here), or `error`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured."""

    work: str
    shape: Mapping[str, Any]
    run: Callable[[Machine], dict[str, Any]]
    """Makes the operands, measures, and gives the other fields of the row."""
    dtype: str = "bfloat16"


Suites = Mapping[str, Sequence[Case]]


def cases(
    work: str, run: Callable[..., dict[str, Any]], sizes: Iterable[Mapping[str, Any]]
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
    forward: Callable[[], Any], leaves: Sequence[Tensor], dys: Sequence[Tensor]
) -> Callable[[], object]:
    """The gradients of the leaves, from one graph that the first call makes."""
    made: list[tuple[Tensor, ...]] = []

    def run() -> object:
        if not made:
            made.append(as_tuple(forward()))
        return torch.autograd.grad(made[0], leaves, dys, retain_graph=True)

    return run


def stepped(
    forward: Callable[[], Tensor], leaves: Sequence[Any], dy: Tensor | None = None
) -> Callable[[], Sequence[Tensor]]:
    """Forward, backward in this thread, gradients dropped: the result, and the gradient of the
    first leaf."""

    def run() -> Sequence[Tensor]:
        y = forward()
        with torch.autograd.set_multithreading_enabled(False):
            y.backward(dy)
        found = y.detach(), leaves[0].grad
        for leaf in leaves:
            leaf.grad = None
        return found

    return run


@contextmanager
def own_winners(device: torch.device) -> Iterator[Findings]:
    """Inside the block the device has the winners of an empty store in memory, and those kept in
    it; the user's come back behind it."""
    store = Findings(None, {})
    with attribute.dict(findings._by_device, {device: store}):
        findings.forget_picks()
        yield store
    findings.forget_picks()


def measure(
    suites: Suites, machine: Machine, meta: Mapping[str, Any], file: Path | None = None
) -> list[Row]:
    """All rows. Prints a line a row and one a suite, and writes `file` after each case."""
    rows: list[Row] = []
    for suite, suite_cases in suites.items():
        for case in suite_cases:
            rows.append(measured(suite, case, machine))
            print(line(rows[-1]), flush=True)
            if file is not None:
                write_output(file, json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        if figures := summary([row for row in rows if row["suite"] == suite]):
            print(f"{suite}: {figures}", flush=True)
    return rows


def measured(suite: str, case: Case, machine: Machine) -> Row:
    """One case's row; what the case raised is the row's error. OSError where the device is lost."""
    row = {"suite": suite, "work": case.work, "shape": dict(case.shape), "dtype": case.dtype}
    try:
        found = case.run(machine)
        return row | {name: value for name, value in found.items() if value not in (None, {})}
    except ERRORS as error:
        row["error"] = f"{type(error).__name__}: {error}"[:500]
        if any(text in str(error) for text in LOST):
            raise OSError(f"the GPU no longer answers after {line(row)}") from error
        return row


def line(row: Row) -> str:
    """A row in one line."""
    sizes = " ".join(f"{name}={size}" for name, size in row["shape"].items())
    parts = [f"{row['suite']}: {row['work']} {sizes}"]
    parts += [f"{row['ours_us']:.1f} us"] if "ours_us" in row else []
    parts += [f"{row['ratio']:.3f} against {row['stock']}"] if "ratio" in row else []
    if "ours_us" in row:
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
    clocks = "--query-gpu=clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    return {
        "device": torch.cuda.get_device_name(machine.device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(machine.device))),
        "clocks": _output("nvidia-smi", clocks, "--format=csv,noheader").splitlines()[:1],
        "ceilings": asdict(machine.ceilings),
        **code_meta(command, commit),
    }


def code_meta(command: str, commit: str | None = None) -> dict[str, Any]:
    """Versions, commit, kernels hash and command."""
    return {
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
    }


def _checked_out() -> str:
    """The commit of the clone, `-dirty` where code differs from it; "unknown" without git."""
    if not (ROOT / ".git").exists() or not (commit := _output("git", "rev-parse", "HEAD")):
        return "unknown"
    code = ("kernels", "rl_consistency", "trainers")
    return commit + ("-dirty" if _output("git", "status", "--porcelain", "--", *code) else "")


def _output(command: str, *arguments: str) -> str:
    """What a command prints in the clone; nothing where it is absent or fails."""
    if shutil.which(command) is None:
        return ""
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
