"""What the benches found: rows and bars, the file that keeps both, and tables of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bars import BARS, COMPARISONS
from benchmarks.rows import Row, geometric_mean
from rl_consistency.numerics.files import write_output

Part = Mapping[str, Sequence[Any]]
"""Sizes of a shape and the values that they have in a part of a suite: some models, or a seed."""

ALL: Part = {}

_DAMAGED = (LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""What reading a file raises that is no results file."""


@dataclass(frozen=True)
class Results:
    """The content of a results file."""

    rows: tuple[Row, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Device, versions, commit and kernels hash of the latest run, and `suites`: those of each, and
    whether it is `complete`, with its `parts` by model or seed where it was measured in some."""

    @property
    def bars(self) -> dict[str, dict[str, Any]]:
        """Every bar's figure and whether it is met: name -> {what, figure, sign, bar, complete,
        reached, met}: reached by what was measured, met if that is complete.

        A bar over a suite that is cut short or measured in part, or has a row with an error, is not
        met. Nor is one over an absent suite, unless the bar says itself which cases it asks for and
        the others have them.
        """
        found, suites = {}, self.meta.get("suites", {})
        for name, bar in BARS.items():
            rows = self.of(*bar.suites)
            figure = bar.figure(rows)
            there = [suite for suite in bar.suites if suite in suites]
            whole = all(_is_complete(suites[suite], self.of(suite)) for suite in there)
            whole = whole and bool(there) and bar.covered(rows)
            whole = whole and (bar.covered is not bool or len(there) == len(bar.suites))
            whole = whole and all(row.error is None for row in rows)
            reached = COMPARISONS[bar.sign]
            hit = figure is not None and math.isfinite(figure) and reached(figure, bar.bar)
            found[name] = {"what": bar.what, "figure": figure, "sign": bar.sign, "bar": bar.bar}
            found[name] |= {"complete": whole, "reached": hit, "met": whole and hit}
        return found

    def of(self, *suites: str, only: Part = ALL) -> list[Row]:
        """Rows of some suites, or of a part of them."""
        return [row for row in self.rows if row.suite in suites and _is_of(row, only)]

    def merged(
        self,
        suite: str,
        rows: Sequence[Row],
        meta: Mapping[str, Any],
        record: Mapping[str, Any],
        *,
        only: Part = ALL,
    ) -> Results:
        """These results with the rows and the record of one suite replaced in their place, and the
        run's meta over the old one. Where a run measured a part of the suite, rows of the others
        stay."""
        first = next((i for i, r in enumerate(self.rows) if r.suite == suite), len(self.rows))
        kept = [r for r in self.of(suite) if not _is_of(r, only)]
        after = (r for r in self.rows[first:] if r.suite != suite)
        suites = dict(self.meta.get("suites", {}))
        parts = dict(suites.get(suite, {}).get("parts", {})) if only else {}
        parts |= {str(value): record["complete"] for values in only.values() for value in values}
        suites[suite] = dict(record) | ({"parts": parts} if parts else {})
        merged = (*self.rows[:first], *kept, *rows, *after)
        return Results(merged, {**self.meta, **meta, "suites": suites})

    def joined(self, other: Results) -> Results:
        """These results with all that another file holds in the place of what this one has of it:
        suites, or the models and seeds of a suite. So GPUs can measure side by side, each into a
        new file."""
        results = self
        for suite, record in other.meta.get("suites", {}).items():
            rows, parts = other.of(suite), record.get("parts", {})
            name = "seed" if any("seed" in row.shape for row in rows) else "model"
            only = {name: [row.shape[name] for row in rows]} if parts else ALL
            results = results.merged(suite, rows, other.meta, record, only=only)
            if parts:  # of which each may be whole or not
                results.meta["suites"][suite]["parts"] |= parts
        return results


def _is_complete(record: Mapping[str, Any], rows: Sequence[Row]) -> bool:
    """Whether a suite, and each of its parts, was measured to its end, and its rows are there."""
    found = [record["complete"], *record.get("parts", {}).values()]
    return all(each is True for each in found) and len(rows) >= record.get("cases", 0)


def _is_of(row: Row, only: Part) -> bool:
    return all(row.shape.get(name) in values for name, values in only.items())


def load(path: Path, device: str | None = None) -> Results:
    """Read a results file; an absent one is empty. ValueError where it is damaged, or holds results
    of another device than `device`."""
    if not path.exists():
        return Results()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results = Results(tuple(Row(**row) for row in content["rows"]), content["meta"])
        recorded = results.meta["device"]
        _ = results.bars  # which ask for the sizes of every row
    except (*_DAMAGED, ValueError) as error:
        raise ValueError(f"{path} is no results file of `python -m benchmarks`: {error}") from error
    if device not in (None, recorded):
        raise ValueError(
            f"{path} holds results of {recorded!r} and this is {device!r}; give another --json."
        )
    return results


def save(path: Path, results: Results) -> None:
    """Write a results file in one piece: one line for each row, without its empty fields."""
    rows = [{k: v for k, v in asdict(row).items() if v not in (None, {})} for row in results.rows]
    listed = ",\n  ".join(map(json.dumps, rows))
    rest = json.dumps({"bars": results.bars, "meta": dict(results.meta)}, indent=1)
    write_output(path, f'{{\n "rows": [\n  {listed}\n ],\n{rest[2:]}\n')


def compare(old: Results, new: Results) -> Iterator[str]:
    """Lines that hold the same cases of two files side by side: new time / old time by suite, and
    every bar's two figures."""
    before = {row.case: row for row in old.rows}
    yield f"{'suite':24} {'cases':>5}  new / old time: ours mean, lowest, highest; stock mean"
    for suite in dict.fromkeys(row.suite for row in new.rows):
        same = [(before[b.case], b) for b in new.of(suite) if b.case in before]
        ours = [b.ours_us / a.ours_us for a, b in same if a.ours_us and b.ours_us]
        stock = [b.stock_us / a.stock_us for a, b in same if a.stock_us and b.stock_us]
        if ours:
            means = (geometric_mean(ours), min(ours), max(ours), geometric_mean(stock))
            yield f"{suite:24} {len(ours):5d}  {'  '.join(shown(mean, '.3f') for mean in means)}"
    yield f"{'bar':28} {'old':>8} {'new':>8}  target"
    old_bars = old.bars
    for name, bar in new.bars.items():
        figures = (shown(bars["figure"], ".3f") for bars in (old_bars[name], bar))
        verdict = "met" if bar["met"] else "missed"
        cells = " ".join(f"{figure:>8}" for figure in figures)
        yield f"{name:28} {cells}  {bar['sign']} {bar['bar']:.2f} {verdict}"


def shown(value: float | str | None, form: str) -> str:
    """A number in the form given; a dash for none."""
    return "-" if value is None else format(value, form)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table: the first `left` columns to the left, numbers to the right."""
    rule = [" --- "] * left + [" ---: "] * (len(head) - left)
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|"]
    return lines + [f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in rows]
