"""The table of docs/study.md and its picture: `python -m benchmarks.study.document`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.results import markdown_table
from benchmarks.study.runs import LAST, LEARNING_RATES, MODES, POLICIES, figures, key_of
from rl_consistency.cli.page.plots import OURS, STOCK, STYLE

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks/results/cpu_study.json"
DOC, PICTURE = ROOT / "docs/study.md", ROOT / "docs/img/study.png"
BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"
"""The table stands between these lines of the document; what was concluded is written by hand."""

COLORS = {"canonical": OURS, "stock": STOCK}

Runs = Mapping[str, Mapping[str, list[Any]]]


def groups(runs: Runs) -> dict[tuple[str, float, str], list[int]]:
    """(policy, learning rate, mode) -> seeds that were run."""
    seeds = sorted({int(key.rpartition(" ")[2]) for key in runs})
    return {
        (policy, rate, mode): [s for s in seeds if key_of(policy, mode, rate, s) in runs]
        for policy, rate, mode in product(POLICIES, LEARNING_RATES, MODES)
    }


def table(runs: Runs) -> list[str]:
    """A line for each policy, learning rate and mode: means over the seeds."""
    head = (
        "policy", "learning rate", "ops", f"reward, last {LAST} steps", "by seed", "KL",
        "largest gradient norm", "clipped", "tokens with other logprobs", "largest difference",
        "tokens with other experts", "collapsed",
    )  # fmt: skip
    rows = []
    for (policy, rate, mode), seeds in groups(runs).items():
        found = [figures(runs[key_of(policy, mode, rate, seed)]) for seed in seeds]
        if not found:
            continue
        mean = {name: fmean(each[name] for each in found) for name in found[0]}
        rows.append(
            (
                policy,
                f"{rate:g}",
                mode,
                f"{mean['reward']:.3f}",
                ", ".join(f"{each['reward']:.2f}" for each in found),
                f"{mean['kl']:.2g}",
                f"{mean['gradient_norm']:.3g}",
                f"{mean['clip_fraction']:.2%}",
                f"{mean['mismatch']:.1%}",
                f"{max(each['difference'] for each in found):.2g}",
                f"{mean['rerouted']:.2%}",
                f"{sum(each['collapsed'] for each in found):.0f} of {len(found)}",
            )
        )
    return markdown_table(head, rows, left=3)


def picture(runs: Runs) -> Figure:
    """Reward by step: a panel for each policy and learning rate, a line for each run."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(POLICIES), len(LEARNING_RATES), sharex=True, sharey=True)
        places = product(POLICIES, LEARNING_RATES)
        for axes, (policy, rate) in zip(panels.flat, places, strict=True):
            for mode, color in COLORS.items():
                for number, seed in enumerate(groups(runs)[policy, rate, mode]):
                    reward = runs[key_of(policy, mode, rate, seed)]["reward"]
                    steps = [i for i, value in enumerate(reward) if value is not None]
                    label = mode if number == 0 else None
                    values = [reward[i] for i in steps]
                    axes.plot(steps, values, color=color, alpha=0.7, linewidth=1.2, label=label)
            axes.set_title(f"{policy}, learning rate {rate:g}")
        panels.flat[0].legend()
        figure.supxlabel("step")
        figure.supylabel("mean reward")
    return figure


def rewritten(text: str, lines: Sequence[str]) -> str:
    """The document with another table; ValueError without exactly one place for it."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{DOC.name} needs exactly one {BEGIN} and one {END} after it.")
    return "\n".join([text.split(BEGIN)[0] + BEGIN, *lines, END + text.split(END)[1]])


def main() -> int:
    """Write the table into the document, and the picture."""
    runs = json.loads(RUNS.read_text("utf-8"))
    DOC.write_text(rewritten(DOC.read_text("utf-8"), ["", *table(runs), ""]), "utf-8")
    figure = picture(runs)
    with rc_context(STYLE):
        figure.savefig(PICTURE, dpi=160)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
