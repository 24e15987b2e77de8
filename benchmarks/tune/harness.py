"""Times the schedules of an op (cold caches, medians); refuses one that gives other bytes.

`write_table` writes the winners of matmul into kernels/matmul/table.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timing import ROUNDS, Rounds
from rl_consistency.numerics.files import write_output
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.tuning.stopwatch import Bench, interleaved
from rl_consistency.tuning.work import Work, compare

TABLE = Path(__file__).resolve().parents[2] / "kernels" / "matmul" / "table.py"
LIBRARY_MARGIN = 0.98
"""The library is preferred where it takes less than this share of the best schedule's time."""


def tune(
    works: Iterable[Work], bench: Bench, file: Path | None = None, rounds: Rounds = ROUNDS
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
            rows[work.key] = row = measured(work, bench, rounds)
        if file is not None:
            write_output(file, json.dumps(rows, indent=1) + "\n")
        print(work.key)
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            print(f"  {us:9.1f} us  {name}{' <- picked' if name == work.picked else ''}")
        for name in row["refused"]:
            print(f"   REFUSED: other bytes  {name}", flush=True)
    return rows


def measured(work: Work, bench: Bench, rounds: Rounds = ROUNDS) -> dict[str, Any]:
    """Microseconds of every candidate that gives the reference's bytes and of the other ways: op,
    shape, picked, `us` by name, `differing` elements of each other way, `refused` candidates."""
    operands = work.operands()
    found = compare(work, operands)
    for name, reason in found.unable.items():
        print(f"  {work.key} {name}: {reason}")
    # Timed calls may write into their operands, so all of them come after the comparisons.
    copies = bench.copies(sum(x.nbytes for x in operands))
    sets = [operands, *(work.operands() for _ in range(copies - 1))]
    calls = {name: [partial(call, *each) for each in sets] for name, call in found.equal.items()}
    samples = interleaved(bench.timers(calls), **asdict(rounds))
    us = {name: 1e6 * median(seconds) for name, seconds in samples.items()}
    measured = {"us": us, "differing": found.differing, "refused": list(found.struck)}
    return {"op": work.op, "shape": dict(work.shape), "picked": work.picked} | measured


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
