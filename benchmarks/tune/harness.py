"""Times the schedules of an op (cold caches, medians); refuses one that gives other bytes.

`write_table` writes the winners of matmul into kernels/matmul/table.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.results import Shape
from benchmarks.timing import ROUNDS, Contestant, Machine, Rounds
from rl_consistency.cli.output_file import write_whole
from rl_consistency.numerics.settings import numeric_settings

TABLE = Path(__file__).resolve().parents[2] / "kernels" / "matmul" / "table.py"
LIBRARY_MARGIN = 0.98
"""The library is preferred where it takes less than this share of the best schedule's time."""

Op = Callable[..., Any]
"""Operands -> a tensor or a tuple of tensors; may write into its operands."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One op at one shape."""

    op: str
    shape: Shape
    operands: Callable[[], tuple[Tensor, ...]]
    candidates: Mapping[str, Op]
    """By name of the schedule; the bytes of the first are the reference."""
    picked: str
    """The candidate that the op takes today."""
    others: Mapping[str, Op] = field(default_factory=dict)
    """Ways to the result that are timed beside the schedules, whatever their bytes."""

    @property
    def key(self) -> str:
        """As it is named in results."""
        return " ".join([self.op, *(f"{name}={size}" for name, size in self.shape.items())])


def tune(
    works: Iterable[Work], machine: Machine, file: Path | None = None, rounds: Rounds = ROUNDS
) -> dict[str, Any]:
    """Measure what the file does not have yet and print a table per work; the file is written after
    each. Returns key -> row; see `measured`."""
    rows: dict[str, Any] = {}
    if file is not None and file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
    for work in works:
        if work.key in rows:
            continue
        with numeric_settings():
            rows[work.key] = row = measured(work, machine, rounds)
        if file is not None:
            write_whole(file, json.dumps(rows, indent=1) + "\n")
        print(work.key)
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            print(f"  {us:9.1f} us  {name}{' <- picked' if name == work.picked else ''}")
        for name in row["refused"]:
            print(f"   REFUSED: other bytes  {name}", flush=True)
    return rows


def measured(work: Work, machine: Machine, rounds: Rounds = ROUNDS) -> dict[str, Any]:
    """Microseconds of every candidate that gives the reference's bytes and of the other ways: op,
    shape, picked, `us` by name, `differing` elements of each other way, `refused` candidates."""
    operands = work.operands()
    reference: list[Tensor] = []
    timed, refused, differing = {}, [], {}
    for name, call in {**work.candidates, **work.others}.items():
        try:
            result = call(*(x.clone() for x in operands))
        except OutOfResources as error:
            print(f"  {work.key} {name}: {error}")
            continue
        result = list(result) if isinstance(result, tuple) else [result]
        reference = reference or result
        pairs = list(zip(result, reference, strict=True))
        if name in work.others:
            differing[name] = sum(int((a != b).sum()) for a, b in pairs)
        elif not all(_same_bytes(a, b) for a, b in pairs):
            refused.append(name)
            continue
        timed[name] = call
    # Timed calls may write into their operands, so all of them come after the comparisons.
    copies = machine.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    us = {
        name: 1e6 * machine.alone(Contestant([partial(call, *each) for each in sets]), rounds)
        for name, call in timed.items()
    }
    found = {"us": us, "differing": differing, "refused": refused}
    return {"op": work.op, "shape": dict(work.shape), "picked": work.picked} | found


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def label(schedule: Any) -> str:
    """A schedule's name, or its fields that are not defaults."""
    if isinstance(schedule, str):
        return schedule
    if hasattr(schedule, "name"):
        return schedule.name
    values = {f.name: (getattr(schedule, f.name), f.default) for f in fields(schedule)}
    return " ".join(f"{name}={value}" for name, (value, usual) in values.items() if value != usual)


def winner(row: Mapping[str, Any]) -> str:
    """The fastest candidate of a row."""
    ours = {name: us for name, us in row["us"].items() if name not in row["differing"]}
    return min(ours, key=lambda name: ours[name])


def write_table(rows: Mapping[str, Any], where: str, file: Path = TABLE) -> None:
    """Write kernels/matmul/table.py; `where` names device and versions."""
    entries = []
    for row in rows.values():
        if row["op"] == "matmul":
            name = winner(row)
            faster = row["us"]["cublaslt"] < row["us"][name] * LIBRARY_MARGIN
            library = faster and row["differing"]["cublaslt"] == 0
            entries.append((*(row["shape"][size] for size in ("layout", *"mnk")), name, library))
    lines = [
        '"""Measured winners of the matmul order\'s schedules; written by',
        "`python -m benchmarks tune matmul --write`.",
        "",
        "Rows: (layout, rows, n, k, schedule, whether the vendor library was faster still).",
        f'Measured on: {where}.\n"""\n',
        "MEASURED: tuple[tuple[str, int, int, int, str, bool], ...] = (",
    ]
    for layout, m, n, k, name, library in sorted(entries):
        lines.append(f'    ("{layout}", {m}, {n}, {k}, "{name}", {library}),')
    file.write_text("\n".join([*lines, ")"]) + "\n", encoding="utf-8")
