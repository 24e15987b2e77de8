"""Writes kernels/matmul/table.py from what `python -m benchmarks tune matmul` measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tune.harness import winner

TABLE = Path(__file__).resolve().parents[2] / "kernels" / "matmul" / "table.py"

LIBRARY_MARGIN = 0.98
"""The library is preferred where it takes less than this share of the best schedule's time."""


def entry(row: Mapping[str, Any]) -> tuple[str, int, int, int, str, bool]:
    """(layout, m, n, k, fastest schedule, whether the library gives its bytes faster still)."""
    shape, name = row["shape"], winner(row)
    faster = row["us"]["cublaslt"] < row["us"][name] * LIBRARY_MARGIN
    library = faster and row["differing"]["cublaslt"] == 0
    return shape["layout"], shape["m"], shape["n"], shape["k"], name, library


def write_table(rows: Mapping[str, Any], where: str, file: Path = TABLE) -> None:
    """Write kernels/matmul/table.py; `where` names device and versions."""
    entries = sorted(entry(row) for row in rows.values() if row["op"] == "matmul")
    lines = [
        '"""Measured winners of the matmul order\'s schedules; written by',
        "`python -m benchmarks tune matmul --write`.",
        "",
        "Rows: (layout, rows, n, k, schedule, whether the vendor library was faster still).",
        f'Measured on: {where}.\n"""\n',
        "MEASURED: tuple[tuple[str, int, int, int, str, bool], ...] = (",
    ]
    for layout, m, n, k, name, library in entries:
        lines.append(f'    ("{layout}", {m}, {n}, {k}, "{name}", {library}),')
    file.write_text("\n".join([*lines, ")"]) + "\n", encoding="utf-8")
