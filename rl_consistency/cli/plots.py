"""The plots of a run, drawn from the rows of its metrics file.

A logarithmic axis has no place for zero, the value this project is about. Differences are drawn on
an axis that is linear below the smallest decade, where zero has a labelled line. A value that is
not finite is drawn as a red cross at the top, never left out.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from rl_consistency.parity.histograms import NOT_FINITE
from rl_consistency.parity.metric_table import DRIFT_SECTION, Panel, Section
from rl_consistency.trainers.run_directory.manifest import listed, require_own, write_own
from rl_consistency.trainers.run_directory.step_files import Rows, load_rows

OURS, STOCK, BAD, INK, MUTED = "#0f766e", "#d97706", "#dc2626", "#1f2937", "#6b7280"
PHASES = ("#0f766e", "#2563eb", "#7c3aed", "#d97706", "#9ca3af")
"""Colors of what is stacked."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#d1d5db",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "svg.fonttype": "path",
    "svg.hashsalt": "rl-consistency",
}


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, from the rows that have it."""
    found = [(row["step"], float(row[key])) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


LOOKS: dict[str, dict[str, Any]] = {
    "ours": {"color": OURS, "linewidth": 2.0},
    "stock": {"color": STOCK, "marker": "o"},
    "mean": {"color": STOCK, "linestyle": "--", "linewidth": 1.2},
    "sparse": {"color": "#2563eb", "marker": "D", "linewidth": 1.2},
    "second": {"color": "#2563eb", "linewidth": 1.2},
}
"""How a curve of a panel is drawn."""


def section_figure(section: Section, rows: Rows) -> Figure:
    """The panels of a section, one below the other or in columns."""
    with rc_context(STYLE):
        heights = [panel.height for panel in section.panels[:: section.columns]]
        figure = _empty_figure(sum(heights))
        shape = {"nrows": len(heights), "ncols": section.columns, "squeeze": False}
        grid = figure.subplots(**shape, sharex=True, height_ratios=heights)
        for axes, panel in zip(grid.flat, section.panels, strict=True):
            axes.set_title(panel.title)
            axes.set_ylabel(panel.unit)
            axes.set_xlabel("step" if axes.get_subplotspec().is_last_row() else "")
            axes.set_xlim(rows[0]["step"] - 0.7, rows[-1]["step"] + 0.7)
            axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
            DRAW[panel.kind](axes, panel, rows)
            _legend(axes)
    return figure


def _empty_figure(height: float) -> Figure:
    figure = Figure(figsize=(9.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(run_dir: str | os.PathLike[str]) -> Path:
    """Write `drift.png`, both paths over the run, into the run directory; errors of `load_rows`."""
    rows, target, stream = load_rows(run_dir), Path(run_dir) / "drift.png", io.BytesIO()
    require_own(target, listed(target.parent))
    drift_picture(rows).savefig(stream, format="png", dpi=160)
    write_own(target, stream.getvalue())
    return target


def drift_picture(rows: Rows) -> Figure:
    """The section of drift under its counts."""
    figure = section_figure(DRIFT_SECTION, rows)
    lines = [f"{name}: {count}" for name, count in drift_counts(rows).items()]
    with rc_context(STYLE):
        figure.suptitle("     ".join(lines), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def drift_counts(rows: Rows) -> dict[str, str]:
    """How many tokens differ over the run, in words, for each path that was measured."""
    counts = {}
    for name, path in (("rl_consistency", "consistency"), ("stock", "stock")):
        tokens = sum(series(rows, f"{path}/tokens")[1])
        mismatched = sum(series(rows, f"{path}/mismatched_tokens")[1])
        if tokens:
            counts[name] = f"{mismatched:,.0f} of {tokens:,.0f} tokens differ"
    return counts


def _difference_axis(axes: Axes, values: Sequence[float]) -> None:
    """An axis with a place for all of these differences, and for zero."""
    positive = [value for value in values if 0 < value < math.inf]
    low = math.floor(math.log10(min(positive, default=1e-9))) - 1
    high = max(math.ceil(math.log10(max(positive, default=1e-6)) + 0.35), low + 2)
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.5)
    axes.set_ylim(-0.35 * 10.0**low, 10.0**high)
    stride = max(math.ceil((high - low) / 7), 1)
    ticks = [0.0, *(10.0**e for e in range(low + 1, high + 1, stride))]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"$10^{{{round(math.log10(value))}}}$" if value else "0 (same bits)"
    )
    axes.axhspan(-0.35 * 10.0**low, 0.35 * 10.0**low, color=OURS, alpha=0.07, linewidth=0)


def growth_figure(rows: Rows) -> Figure:
    """How the difference of two sides grows from op to op; rows are those of `localize --json`."""
    sizes = [float(row["relative_rms"]) for row in rows]
    drawn = [{"step": i, row["pass"]: sizes[i]} for i, row in enumerate(rows)]
    with rc_context(STYLE):
        figure = _empty_figure(3.4)
        axes = figure.subplots()
        _difference_axis(axes, sizes)
        _line(axes, drawn, "forward", "forward", OURS, marker=".")
        _line(axes, drawn, "backward", "backward", STOCK, marker=".")
        axes.set_title("Difference by op")
        axes.set_ylabel("RMS, relative to the values'")
        axes.set_xlabel("op, in order of execution")
        _legend(axes)
    return figure


def _lines_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(4))
    for curve in panel.curves:
        _line(axes, rows, curve.key, curve.label, **LOOKS[curve.look])


def _difference_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    _lines_panel(axes, panel, rows)
    _difference_axis(axes, _values(rows, panel))


def _share_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    _lines_panel(axes, panel, rows)
    for curve in panel.curves:
        bad = [row for row in rows if row.get("consistency/mismatched_tokens")]
        if curve.look == "ours" and bad:
            steps, shares = series(bad, curve.key)
            drawn = [_drawn(value, math.nan) for value in shares]
            axes.plot(steps, drawn, "X", color=BAD, label=f"{curve.label} drifted")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    top = max(filter(math.isfinite, _values(rows, panel)), default=0.0)
    axes.set_ylim(-0.04 * max(top, 0.1), max(1.25 * top, 0.1))


def _checks_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    counts, verdicts = (dict(zip(*series(rows, curve.key))) for curve in panel.curves)
    passed = {s: count for s, count in counts.items() if count == 0 and verdicts.get(s, True)}
    failed = {s: _drawn(count, 0.0) for s, count in counts.items() if s not in passed}
    looks = {"passed": (passed, "o", OURS), "failed": (failed, "X", BAD)}
    for verdict, (points, marker, color) in looks.items():
        if points:
            label = f"{verdict} ({len(points)})"
            axes.plot(*zip(*points.items()), marker, color=color, label=label)
    top = max(failed.values(), default=0.0)
    axes.set_ylim(-0.12 * max(top, 1), 1.3 * max(top, 1))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _stacked_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    steps = [row["step"] for row in rows]
    floor = [0.0] * len(steps)
    for curve, color in zip(panel.curves, PHASES, strict=True):
        heights = [_drawn(float(row.get(curve.key, 0.0)), 0.0) for row in rows]
        if any(heights):
            axes.bar(steps, heights, bottom=floor, width=0.85, color=color, label=curve.label)
            floor = [low + height for low, height in zip(floor, heights)]
    axes.set_ylim(0, 1.08 * max(*floor, 1e-3))


def _histogram_panel(axes: Axes, panel: Panel, rows: Rows) -> None:
    """A square for each step and bin that is not empty; the darker, the more tokens. Those of the
    stock path are smaller, on ours."""
    assert panel.histogram is not None
    histogram, names = panel.histogram, [*panel.histogram.bins, NOT_FINITE]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(-0.7, len(names) - 0.3)
    # About as wide as a step.
    width = min(max(480 / len(rows), 2.0), 11.0)
    for side, color, size in (("consistency", OURS, width), ("stock", STOCK, 0.6 * width)):
        found = [
            (step, place, max(_drawn(count, 1.0), 0.0))
            for place, name in enumerate(names)
            for step, count in zip(*series(rows, f"{side}/{histogram.name}/count/{name}"))
        ]
        if not found:
            continue
        steps, places, counts = zip(*found)
        most = math.log1p(max(*counts, 1.0))
        shades = [0.25 + 0.75 * math.log1p(count) / most for count in counts]
        bases = [BAD if place == len(names) - 1 else color for place in places]
        colors, label = [*map(to_rgba, bases, shades)], "stock" if side == "stock" else ""
        axes.scatter(steps, places, s=size**2, c=colors, marker="s", linewidths=0, label=label)
    named = histogram.bins.index(f"{histogram.exact:g}")
    axes.axhspan(named - 0.5, named + 0.5, color=OURS, alpha=0.07, linewidth=0)


DRAW: dict[str, Callable[[Axes, Panel, Rows], None]] = {
    "lines": _lines_panel,
    "difference": _difference_panel,
    "share": _share_panel,
    "checks": _checks_panel,
    "stacked": _stacked_panel,
    "histogram": _histogram_panel,
}
"""Kind of panel -> what draws it; a table is no figure."""


def _values(rows: Rows, panel: Panel) -> list[float]:
    return [value for curve in panel.curves for value in series(rows, curve.key)[1]]


def _drawn(value: float, otherwise: float) -> float:
    """A value where it has a place on an axis."""
    return value if math.isfinite(value) else otherwise


def _line(axes: Axes, rows: Rows, key: str, label: str, color: str, **style: Any) -> None:
    steps, values = series(rows, key)
    if not steps:
        return
    marker = style.pop("marker", "o" if len(steps) == 1 else None)
    options = {"linewidth": 1.6, "marker": marker, "markersize": 4.5} | style
    drawn = [_drawn(value, math.nan) for value in values]
    axes.plot(steps, drawn, color=color, label=label, **options)
    if bad := [step for step, value in zip(steps, values) if not math.isfinite(value)]:
        crosses = {"linestyle": "", "marker": "X", "color": BAD, "clip_on": False}
        height = {"transform": axes.get_xaxis_transform(), "label": "not finite"}
        axes.plot(bad, [0.96] * len(bad), **crosses, **height)


def _legend(axes: Axes) -> None:
    """The legend on the title's line, where no data can be under it."""
    if not (axes.lines or axes.collections or axes.containers):
        middle = {"transform": axes.transAxes, "ha": "center"}
        axes.text(0.5, 0.5, "not measured in this run", color=MUTED, **middle)
    elif labels := axes.get_legend_handles_labels()[1]:
        options = {"handlelength": 1.6, "columnspacing": 1.4, "borderaxespad": 0.1}
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(labels), **options)
