"""Plots of a results file: stock time / our time, for every shape."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from benchmarks.results_file import BARS, Results, Row
from rl_consistency.cli.plots import BAD, MUTED, OURS, STOCK, STYLE

LINES = {
    "matmul_forward": ("m", "rows (M)"),
    "matmul_dx": ("m", "rows (M)"),
    "gradient_fold": ("tokens", "tokens"),
    "attention_forward": ("length", "tokens of a sequence"),
    "attention_backward": ("length", "tokens of a sequence"),
    "attention_decode": ("batch", "sequences"),
}
"""Suites drawn as lines: the key of the shape along the axis, and its label. Others are drawn as
one row of marks per case."""

TICKS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0, 16.0, 32.0, 64.0)
FINE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0)
"""Where the highest ratio is less than three times the lowest."""


ROLLOUT = "rollout"
"""Suites of this prefix are a table: their rows differ in kind."""


def save_plots(results: Results, directory: Path) -> list[Path]:
    """Write `bench_<suite>.png` and `.svg` of every suite that has ratios.

    Returns:
        The files written.
    """
    written = []
    for suite in dict.fromkeys(row.suite for row in results.rows):
        if suite.startswith(ROLLOUT):
            continue
        rows = [r for r in results.rows if r.suite == suite and r.ratio is not None]
        if not rows:
            continue
        figure = ratio_figure(suite, rows, str(results.meta.get("device", "")))
        for kind in ("png", "svg"):
            target = directory / f"bench_{suite}.{kind}"
            unfinished = target.with_name(f".{target.name}.unfinished")
            # Without a date the same results give the same file.
            metadata = {"Date": None} if kind == "svg" else None
            with rc_context(STYLE):
                figure.savefig(unfinished, format=kind, dpi=160, metadata=metadata)
            os.replace(unfinished, target)
            written.append(target)
    return written


def ratio_figure(suite: str, rows: Sequence[Row], device: str) -> Figure:
    """The ratios of one suite's rows."""
    height = 4.2 if suite in LINES else 1.4 + 0.27 * len(rows)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        if suite in LINES:
            _lines(axes, rows, *LINES[suite])
        else:
            _marks(axes, rows)
        against = "our time" if suite in LINES else "time"
        title = f"{suite.replace('_', ' ')}: stock time / {against}, {device}"
        axes.set_title(title.rstrip(", "))
    return figure


def _lines(axes: Axes, rows: Sequence[Row], key: str, label: str) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        rest = " ".join(f"{k} {v}" for k, v in row.shape.items() if k not in (key, *_implied(key)))
        assert row.ratio is not None
        series.setdefault(rest, []).append((int(row.shape[key]), row.ratio))
    colors = colormaps["viridis"]
    for i, (name, points) in enumerate(series.items()):
        x, y = zip(*sorted(points), strict=True)
        color = colors(0.95 * i / max(len(series) - 1, 1))
        axes.plot(x, y, marker="o", markersize=3.5, linewidth=1.3, color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({int(row.shape[key]) for row in rows})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel(label)
    _ratio_axis(axes, rows, "y")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _implied(key: str) -> tuple[str, ...]:
    """Sizes that follow from the one along the axis."""
    return ("batch",) if key == "length" else ()


def _marks(axes: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row.work}, " + " ".join(f"{k} {v}" for k, v in row.shape.items()) for row in rows]
    places = list(range(len(rows)))[::-1]
    peers = dict.fromkeys(name for row in rows for name in row.peers)
    markers = dict(zip(peers, "sD^vPX<>", strict=False))
    for name, marker in markers.items():
        points = [
            (row.stock_us / row.peers[name], place)
            for row, place in zip(rows, places, strict=True)
            if name in row.peers and row.stock_us
        ]
        x, y = zip(*points, strict=True)
        options = {"color": STOCK, "markerfacecolor": "none", "markersize": 5}
        axes.plot(x, y, linestyle="", marker=marker, label=name, **options)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    axes.plot(ratios, places, linestyle="", marker="o", color=OURS, label="rl_consistency")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    _ratio_axis(axes, rows, "x")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.06), ncols=4, borderaxespad=0)


def _ratio_axis(axes: Axes, rows: Sequence[Row], side: str) -> None:
    """A logarithmic axis with stock's speed as a line, and the lowest bar of the suite dashed."""
    low, high = (axes.get_ylim if side == "y" else axes.get_xlim)()
    draw = axes.axhline if side == "y" else axes.axvline
    draw(1.0, color=MUTED, linewidth=1.2)
    bars = [b.bar for n, b in BARS.items() if rows[0].suite in b.suites and n not in NOT_RATIOS]
    if bars:
        draw(min(bars), color=BAD, linewidth=1.0, linestyle="--")
        low = min(low, min(bars))
    axis = axes.yaxis if side == "y" else axes.xaxis
    (axes.set_yscale if side == "y" else axes.set_xscale)("log")
    limits = (max(min(low, 0.9), 0.05) * 0.95, max(high, 1.1) * 1.05)
    (axes.set_ylim if side == "y" else axes.set_xlim)(*limits)
    fine = limits[1] < 3 * limits[0]
    axis.set_major_locator(FixedLocator(FINE_TICKS if fine else TICKS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


NOT_RATIOS = (
    "elementwise_bandwidth",
    "token_logprobs_liger",
    "token_logprobs_memory",
    "token_logprobs_memory_fp32",
    "training_step_liger",
)
"""Bars whose figure is not stock time / our time."""
