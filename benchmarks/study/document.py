"""What the study's runs say: `python -m benchmarks.study.document FOLDER|FILE [--least N]`.

FOLDER is that of `benchmarks.study.runs`, FILE what `--json` wrote of one. Prints the table of
docs/study.md; `--picture` draws its picture. A setting's runs are compared over the steps that all
of them took, and only seeds of which each arm took N or ended before because it could not go on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.study.arms import ARMS
from benchmarks.study.runs import FAILED, SETTINGS
from rl_consistency.cli.plots import OURS, STOCK, STYLE
from rl_consistency.numerics.files import write_whole

SERIES = {
    "reward": "reward/mean",
    "held_out": "eval/reward",
    "kl_k1": "consistency/kl/k1",
    "kl_k3": "consistency/kl/k3",
    "difference": "consistency/logprob_abs_diff/max",
    "differing": "consistency/mismatch_fraction",
    "ratio_min": "consistency/importance_ratio/min",
    "ratio_max": "consistency/importance_ratio/max",
    "gradient_norm": "gradient_norm",
    "clipped": "policy/clip_fraction",
    "truncated": "study/weight/truncated",
    "entropy": "policy/entropy",
    "length": "completion/length_mean",
    "tokens": "consistency/tokens",
    "seconds": "time/step_seconds",
}
"""What is kept of a step: name here -> metric. Those of consistency/ compare training before its
first update with the rollout."""

WINDOW = 20
"""Steps over which a reward is averaged."""
LOOKS = dict(zip(ARMS, (OURS, STOCK, "#2563eb"), strict=True))
PANELS = {
    "reward": "reward",
    "held_out": "held-out sums right",
    "kl_k3": "KL(rollout || training), k3",
    "gradient_norm": "gradient norm",
    "entropy": "entropy, nats",
}

Run = Mapping[str, Any]
"""Setting, arm, seed, `failure` (why it ended early, or None), and `series`: name -> a value for
each step from 0 on, None where it has none."""


def collected(folder: Path) -> dict[str, Any]:
    """The runs of a folder, with what they were recorded with."""
    runs: list[Run] = []
    for directory in sorted(file.parent for file in folder.glob("*/metrics.jsonl")):
        setting, arm, seed = directory.name.rsplit("_", 2)
        lines = (directory / "metrics.jsonl").read_text("utf-8").splitlines()
        by_step = {row["step"]: row for row in map(json.loads, lines)}
        rows = [by_step.get(step, {}) for step in range(max(by_step) + 1)]
        series = {name: [_short(row.get(key)) for row in rows] for name, key in SERIES.items()}
        failed = directory / FAILED
        runs.append(
            {
                "setting": setting,
                "arm": arm,
                "seed": int(seed),
                "failure": failed.read_text("utf-8").strip() if failed.exists() else None,
                "series": series,
            }
        )
    meta = folder / "meta.json"
    return {"meta": json.loads(meta.read_text("utf-8")) if meta.exists() else {}, "runs": runs}


def _short(value: float | None) -> float | None:
    """Five digits, as many as are read."""
    return value if value is None or not math.isfinite(value) else float(f"{value:.5g}")


class Group(NamedTuple):
    """The runs of a setting that are compared."""

    steps: int
    arms: dict[str, list[Run]]
    """Arm -> runs, in the order of their seeds, which are those of every arm."""


def groups(runs: Sequence[Run], least: int) -> dict[str, Group]:
    """Setting -> what is compared of it."""
    found: dict[str, Group] = {}
    for setting in SETTINGS:
        arms = {
            arm: {
                run["seed"]: run
                for run in runs
                if (run["setting"], run["arm"]) == (setting, arm)
                and (run["failure"] or _steps(run) >= least)
            }
            for arm in ARMS
        }
        if seeds := sorted(set.intersection(*map(set, arms.values()))):
            chosen = {arm: [by[seed] for seed in seeds] for arm, by in arms.items()}
            whole = [_steps(run) for each in chosen.values() for run in each if not run["failure"]]
            found[setting] = Group(min(whole, default=least), chosen)
    return found


def _steps(run: Run) -> int:
    """Steps that a run took."""
    return len(run["series"]["reward"]) - 1


def figures(run: Run, steps: int) -> dict[str, float]:
    """What the table says of a run's first steps."""

    def known(name: str) -> list[float]:
        return [value for value in run["series"][name][: steps + 1] if value is not None]

    reward, tokens = known("reward"), sum(known("tokens"))
    held_out = run["series"]["held_out"][: steps + 1]
    windows = [fmean(reward[i : i + WINDOW]) for i in range(max(len(reward) - WINDOW, 0) + 1)]
    pairs = zip(known("differing"), known("tokens"), strict=True)
    return {
        "reward": windows[-1],
        "held_out": next((v for v in held_out[:0:-1] if v is not None), math.nan),
        "kl": fmean(known("kl_k3")),
        "difference": max(known("difference")),
        "differing": sum(share * count for share, count in pairs) / tokens,
        "ratio_min": min(known("ratio_min")),
        "ratio_max": max(known("ratio_max")),
        "gradient_norm": median(known("gradient_norm")),
        "largest_norm": max(known("gradient_norm")),
        "seconds": median(known("seconds")),
        "collapsed": float(bool(run["failure"]) or windows[-1] < max(windows) / 2),
    }


COLUMNS: Mapping[str, Any] = {
    "reward, last 20 steps": lambda f: f"{fmean(f['reward']):.3f}",
    "by seed": lambda f: ", ".join(f"{value:.2f}" for value in f["reward"]),
    "held-out, last": lambda f: ", ".join(
        "-" if math.isnan(value) else f"{value:.2f}" for value in f["held_out"]
    ),
    "KL": lambda f: f"{fmean(f['kl']):.1e}" if any(f["kl"]) else "0",
    "tokens that differ": lambda f: f"{fmean(f['differing']):.1%}" if any(f["differing"]) else "0",
    "first ratios": lambda f: f"{min(f['ratio_min']):.3g} to {max(f['ratio_max']):.3g}",
    "gradient norm: median, largest": lambda f: (
        f"{fmean(f['gradient_norm']):.2g}, {max(f['largest_norm']):.3g}"
    ),
    "collapsed": lambda f: f"{sum(f['collapsed']):.0f} of {len(f['collapsed'])}",
    "seconds a step": lambda f: f"{fmean(f['seconds']):.2f}",
}
"""Column of the table -> its text, from each figure's values by seed."""


def table(runs: Sequence[Run], least: int) -> list[str]:
    """A line for each setting and arm."""
    lines = [["setting", "steps", "arm", *COLUMNS], ["---"] * 3 + ["---:"] * len(COLUMNS)]
    for setting, (steps, arms) in groups(runs, least).items():
        for arm, found in arms.items():
            each = [figures(run, steps) for run in found]
            columns = {name: [one[name] for one in each] for name in each[0]}
            texts = [text(columns) for text in COLUMNS.values()]
            lines.append([setting, str(steps), arm, *texts])
    return [f"| {' | '.join(line)} |" for line in lines]


def picture(runs: Sequence[Run], least: int) -> Figure:
    """A row for each series, a column for each setting, a line for each run."""
    found = groups(runs, least)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(found), 2.0 * len(PANELS)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(PANELS), len(found), sharex="col", squeeze=False)
        for column, (setting, group) in enumerate(found.items()):
            for row, (name, title) in enumerate(PANELS.items()):
                axes = grid[row, column]
                for arm, color in LOOKS.items():
                    for number, run in enumerate(group.arms[arm]):
                        values = list(enumerate(run["series"][name][: group.steps + 1]))
                        drawn = [(i, v) for i, v in values if v is not None and math.isfinite(v)]
                        label = arm if number == 0 else None
                        look = {"color": color, "alpha": 0.75, "linewidth": 1.1, "label": label}
                        axes.plot(*zip(*drawn, strict=True), **look)
                axes.set_title(f"{setting}: {title}", fontsize=9)
                if name in ("kl_k3", "gradient_norm"):
                    axes.set_yscale("symlog", linthresh=1e-6 if name == "kl_k3" else 1e-2)
        grid[0, 0].legend()
        figure.supxlabel("step")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the runs; print and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="FOLDER|FILE")
    parser.add_argument("--least", type=int, default=20, metavar="N")
    parser.add_argument("--json", type=Path, help="write the runs there")
    parser.add_argument("--picture", type=Path, help="draw the picture there")
    args = parser.parse_args(arguments)
    is_file = args.source.is_file()
    found = json.loads(args.source.read_text("utf-8")) if is_file else collected(args.source)
    if args.json:
        heads = [f'"meta": {json.dumps(found["meta"])}', '"runs": [']
        lines = ",\n".join(map(json.dumps, found["runs"]))
        write_whole(args.json, "{" + ",\n".join(heads) + f"\n{lines}\n]}}\n")
    print("\n".join(table(found["runs"], args.least)))
    if args.picture:
        with rc_context(STYLE):
            picture(found["runs"], args.least).savefig(args.picture, dpi=80)
    return 0


if __name__ == "__main__":
    sys.exit(main())
