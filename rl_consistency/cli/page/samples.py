"""The part of a run's page that shows completions."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_consistency.trainers.run_directory.rows_file import read_rows

COLUMNS = ("step", "prompt", "completion", "answer", "reward", "tokens", "finish_reason")
STEPS = 3
"""Steps that are shown at either end of the run."""


def samples_section(file: Path) -> str:
    """Completions of the first and the last steps with their rewards; "" where a run has none."""
    rows = read_rows(file, _check) if file.is_file() else []
    if not rows:
        return ""
    shown = rows if len(rows) <= 2 * STEPS else [*rows[:STEPS], *rows[-STEPS:]]
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in COLUMNS)
    body = "".join(line for row in shown for line in _lines(row))
    return (
        "<section><h2>Samples</h2><p>Completions of the first and the last steps, the best and the "
        f"worst of a group. All are in {file.name}.</p><table><tr>{head}</tr>{body}</table>"
        "</section>"
    )


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    for sample in row["samples"]:
        cells = {**sample, "step": row["step"], "reward": f"{sample['reward']:.6g}"}
        texts = (html.escape(str(cells[name])) for name in COLUMNS)
        yield "<tr>" + "".join(f"<td><code>{text}</code></td>" for text in texts) + "</tr>"


def _check(row: dict[str, Any]) -> None:
    samples = row.get("samples")
    needed = {*COLUMNS} - {"step"}
    if not isinstance(samples, list) or not all(
        isinstance(s, dict) and needed <= s.keys() and isinstance(s["reward"], int | float)
        for s in samples
    ):
        raise TypeError('"samples" must be a list of completions with their rewards')
