"""The plots of a run, drawn from the rows of its metrics file.

A logarithmic axis has no place for zero, the value this project is about. Differences are drawn on
an axis that is linear below the smallest decade, where zero has a labelled line. A value that is
not finite is drawn as a red cross at the top, never left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from rl_consistency.cli.run_files import Rows, load_rows
from rl_consistency.trainers.run_directory.directory import own_file
from rl_consistency.trainers.run_directory.unfinished import unfinished

OURS, STOCK, BAD, INK, MUTED = "#0f766e", "#d97706", "#dc2626", "#1f2937", "#6b7280"
PHASES = {
    "rollout": "#0f766e",
    "training": "#2563eb",
    "optimizer": "#7c3aed",
    "shadow": "#d97706",
    "gradient_check": "#9ca3af",
}
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


Draw = Callable[[Figure, Rows], None]


def _figure(width: float, height: float) -> Callable[[Draw], Callable[[Rows], Figure]]:
    """Make `fill(figure, rows)` a function of the rows that returns the figure, in our style."""

    def decorate(fill: Draw) -> Callable[[Rows], Figure]:
        @wraps(fill)
        def draw(rows: Rows) -> Figure:
            with rc_context(STYLE):
                figure = Figure(figsize=(width, height), layout="constrained")
                FigureCanvasAgg(figure)
                fill(figure, rows)
            return figure

        return draw

    return decorate


def save_picture(run_dir: str | os.PathLike[str]) -> Path:
    """Write `drift.png`, both paths over the run, into the run directory; errors of `load_rows`."""
    rows, target = load_rows(run_dir), own_file(Path(run_dir), "drift.png")
    with unfinished(target.parent) as place:
        drift_figure(rows).savefig(place / target.name, format="png", dpi=160)
        os.replace(place / target.name, target)
    return target


@_figure(9.0, 6.2)
def drift_figure(figure: Figure, rows: Rows) -> None:
    """Our path against the stock path: largest |difference| and share of differing tokens."""
    size, share = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _difference_panel(size, rows)
    size.set_title("Logprob difference")
    size.tick_params(labelbottom=False)

    _line(share, rows, "stock/mismatch_fraction", STOCK, "stock", marker="o")
    _line(share, rows, "consistency/mismatch_fraction", OURS, "rl_consistency", linewidth=2.4)
    if drifted := [row for row in rows if row.get("consistency/mismatched_tokens")]:
        steps, shares = series(drifted, "consistency/mismatch_fraction")
        drawn = [_drawn(value, math.nan) for value in shares]
        share.plot(steps, drawn, "X", color=BAD, label="rl_consistency drifted")
    share.set_title("Tokens whose bits differ")
    share.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    top = _largest(rows, "stock/mismatch_fraction", "consistency/mismatch_fraction")
    share.set_ylim(-0.04 * max(top, 0.1), max(1.25 * top, 0.1))
    _step_axis(share, rows)
    _legend(share)
    lines = [f"{name}: {count}" for name, count in drift_counts(rows).items()]
    figure.suptitle("     ".join(lines), x=0.01, ha="left", fontsize=12, fontweight="bold")


def drift_counts(rows: Rows) -> dict[str, str]:
    """For each path that was measured, in words, how many of its tokens differ over the run."""
    counts = {}
    for name, path in (("rl_consistency", "consistency"), ("stock", "stock")):
        tokens = sum(series(rows, f"{path}/tokens")[1])
        mismatched = sum(series(rows, f"{path}/mismatched_tokens")[1])
        if tokens:
            counts[name] = f"{mismatched:,.0f} of {tokens:,.0f} tokens differ"
    return counts


def _difference_panel(axes: Axes, rows: Rows) -> None:
    suffixes = ("logprob_abs_diff/max", "logprob_abs_diff/mean")
    keys = [f"{path}/{suffix}" for path in ("stock", "consistency") for suffix in suffixes]
    _difference_axis(axes, [value for key in keys for value in series(rows, key)[1]])
    _line(axes, rows, keys[0], STOCK, "stock, max", marker="o")
    _line(axes, rows, keys[1], STOCK, "stock, mean", linestyle="--", linewidth=1.2)
    _line(axes, rows, keys[2], OURS, "rl_consistency, max", linewidth=2.4)
    axes.set_ylabel("|training − rollout|, nats")
    _legend(axes)


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
    axes.yaxis.set_major_formatter(FuncFormatter(_difference_label))
    axes.axhspan(-0.35 * 10.0**low, 0.35 * 10.0**low, color=OURS, alpha=0.07, linewidth=0)


def _difference_label(value: float, _: object = None) -> str:
    return "0 (same bits)" if value == 0 else f"$10^{{{round(math.log10(value))}}}$"


@_figure(9.0, 3.4)
def growth_figure(figure: Figure, rows: Rows) -> None:
    """How the difference of two sides grows from op to op; rows are those of `localize --json`."""
    axes = figure.subplots()
    sizes = [float(row["relative_rms"]) for row in rows]
    _difference_axis(axes, sizes)
    drawn = [{"step": i, row["pass"]: sizes[i]} for i, row in enumerate(rows)]
    _line(axes, drawn, "forward", OURS, "forward", marker=".")
    _line(axes, drawn, "backward", STOCK, "backward", marker=".")
    axes.set_title("Difference by op")
    axes.set_ylabel("RMS, relative to the values'")
    axes.set_xlabel("op, in order of execution")
    _legend(axes)


@_figure(9.0, 3.4)
def reward_figure(figure: Figure, rows: Rows) -> None:
    """Mean reward of the training completions and of the evaluations."""
    axes = figure.subplots()
    _line(axes, rows, "reward/mean", OURS, "training completions", linewidth=1.8)
    _line(axes, rows, "eval/reward", "#2563eb", "evaluation", marker="D", linewidth=1.2)
    axes.set_title("Mean reward")
    _step_axis(axes, rows)
    _legend(axes)


LEARNING = (
    ("loss", "Loss"),
    ("gradient_norm", "Gradient norm"),
    ("policy/entropy", "Entropy, nats"),
    ("policy/kl/k3", "KL to the reference, nats"),
    ("policy/clip_fraction", "Clipped share of tokens"),
    ("completion/length_mean", "Mean completion length, tokens"),
)
"""Metric -> title of its panel."""


@_figure(9.0, 6.4)
def learning_figure(figure: Figure, rows: Rows) -> None:
    """A panel for each of the curves that say how training goes; a run may lack some."""
    for axes, (key, title) in zip(figure.subplots(3, 2, sharex=True).flat, LEARNING, strict=True):
        _line(axes, rows, key, OURS, "")
        axes.set_title(title)
        if not series(rows, key)[0]:
            _legend(axes)  # says that it was not measured
        axes.yaxis.set_major_locator(MaxNLocator(4))
        _step_axis(axes, rows)
        if not axes.get_subplotspec().is_last_row():
            axes.set_xlabel("")


@_figure(9.0, 2.4)
def gradient_check_figure(figure: Figure, rows: Rows) -> None:
    """Gradient elements whose bits changed when the step was recomputed under other groupings."""
    axes = figure.subplots()
    axes.set_title("Gradient elements changed by regrouping the batch")
    key = "consistency/gradient_check"
    steps, counts = series(rows, f"{key}/mismatched_elements")
    verdicts = dict(zip(*series(rows, f"{key}/passed")))
    passed = [(s, c) for s, c in zip(steps, counts) if verdicts.get(s, c == 0) and c == 0]
    failed = [(s, c) for s, c in zip(steps, counts) if (s, c) not in passed]
    failed = [(s, _drawn(c, 0.0)) for s, c in failed]
    for points, color, marker, label in (
        (passed, OURS, "o", f"passed ({len(passed)})"),
        (failed, BAD, "X", f"failed ({len(failed)})"),
    ):
        if points:
            axes.plot(*zip(*points), linestyle="", marker=marker, color=color, label=label)
    top = max((count for _, count in failed), default=0.0)
    axes.set_ylim(-0.12 * max(top, 1), 1.3 * max(top, 1))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    _step_axis(axes, rows)
    _legend(axes)


@_figure(9.0, 4.6)
def timing_figure(figure: Figure, rows: Rows) -> None:
    """Seconds of each phase per step, and tokens sampled per second."""
    seconds, speed = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = [row["step"] for row in rows]
    floor = [0.0] * len(steps)
    for phase, color in PHASES.items():
        key = f"time/{phase}_seconds"
        heights = [_drawn(float(row.get(key, 0.0)), 0.0) for row in rows]
        if any(heights):
            label = phase.replace("_", " ")
            seconds.bar(steps, heights, bottom=floor, width=0.85, color=color, label=label)
            floor = [low + height for low, height in zip(floor, heights)]
    seconds.set_title("Seconds per step, by phase")
    seconds.tick_params(labelbottom=False)
    seconds.set_ylim(0, 1.08 * max(*floor, 1e-3))
    _legend(seconds)
    _line(speed, rows, "tokens_per_second", OURS, "tokens sampled")
    speed.set_title("Tokens per second")
    speed.set_ylim(0, 1.15 * _largest(rows, "tokens_per_second") or 1.0)
    _step_axis(speed, rows)


def _largest(rows: Rows, *keys: str) -> float:
    """The largest finite value of these metrics, at least 0."""
    values = (value for key in keys for value in series(rows, key)[1])
    return max(filter(math.isfinite, values), default=0.0)


def _drawn(value: float, otherwise: float) -> float:
    """A value where it has a place on an axis."""
    return value if math.isfinite(value) else otherwise


def _line(axes: Axes, rows: Rows, key: str, color: str, label: str, **style: Any) -> None:
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


def _step_axis(axes: Axes, rows: Rows) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(rows[0]["step"] - 0.7, rows[-1]["step"] + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))


def _legend(axes: Axes) -> None:
    """The legend on the title's line, where no data can be under it."""
    _, labels = axes.get_legend_handles_labels()
    if not labels:
        middle = {"transform": axes.transAxes, "ha": "center"}
        axes.text(0.5, 0.5, "not measured in this run", color=MUTED, **middle)
        return
    options = {"handlelength": 1.6, "columnspacing": 1.4, "borderaxespad": 0.1}
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(labels), **options)
