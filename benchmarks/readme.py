"""The README's GPU benchmark section and its plots, from benchmarks/results/h200.json.

Usage: python -m benchmarks.readme [--check]. Writes the section between the markers,
docs/img/bench_*.{png,svg} and, where a decode step was recorded, docs/img/decode_step.png; with
--check it writes nothing and exits 1 if the section is not what the results file gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import ROLLOUT, save_plots
from benchmarks.results_file import BARS, Results, Row, load
from benchmarks.rollout import profile as decode_profile
from benchmarks.rollout.table import OWN, rollout_markdown
from rl_consistency.kernels.core.kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/h200.json"
README = ROOT / "README.md"
IMAGES = ROOT / "docs/img"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SHOWN = {
    "training_step": "Training step",
    "matmul_forward": "Matmul",
    "matmul_dx": "Matmul, dX",
    "gradient_fold": "dW",
    "attention_forward": "Attention forward",
    "attention_backward": "Attention backward",
    "attention_decode": "Paged decode",
}
"""Suites whose plot the README shows, and what it shows."""


ABOUT_ROLLOUT = (
    "Rollout, `rl-consistency bench rollout`: ours is the engine with canonical ops, stock the "
    "same engine with stock ops (SDPA, cuBLAS) under `strict(False)`. Tokens per second are those "
    "of decoding, against Hugging Face and in GRPO steps those of the whole. The roofline is the "
    "bytes of weights, keys and values that a step must read over the measured bandwidth of a copy "
    "(bytes read and written). What each row measures: [docs/rollout.md](docs/rollout.md)."
)


def section(results: Results) -> str:
    """The text between the markers, every figure from the results."""
    if not results.rows:
        return "No GPU figures are recorded yet: `rl-consistency bench ops` measures them."
    meta = results.meta
    versions = meta["versions"]
    lines = [
        *_stale(meta),
        f"{meta['device']}, torch {versions['torch']}, Triton {versions['triton']}; "
        "`rl-consistency bench ops` and `bench model`, every row in "
        "[benchmarks/results/h200.json](benchmarks/results/h200.json). Figures are stock time / "
        "our time in the same run unless said otherwise: bfloat16, medians, caches cold; products "
        "of up to 256 rows and paged decode many at a time in a CUDA graph, as decoding runs them, "
        "where launches of ours overlap.",
        "",
        "| work | figure | target | met |",
        "| --- | ---: | ---: | --- |",
    ]
    rollout = [r for r in results.rows if r.suite.startswith(ROLLOUT) and r.suite != OWN]
    lines += [
        _bar_line(name, bar)
        for name, bar in results.bars.items()
        if rollout or not name.startswith(ROLLOUT)
    ]
    lines += _steps(results)
    lines += _rollout(rollout)
    lines += _plots(results)
    return "\n".join(lines)


def _stale(meta: Mapping[str, Any]) -> list[str]:
    """A warning that names the suites measured with other kernels than the ones here."""
    here = kernels_hash()
    by_hash: dict[str, list[str]] = {}
    for suite, record in meta["suites"].items():
        measured = record.get("kernels_sha256", meta["kernels_sha256"])
        if measured != here:
            by_hash.setdefault(measured[:12], []).append(suite)
    if not by_hash:
        return []
    found = "; ".join(f"`{kernels}`: {', '.join(suites)}" for kernels, suites in by_hash.items())
    return [
        f"**Not this tree.** Some suites were measured with kernels of another hash ({found}), "
        "which have changed since; they are a state of work, to be measured again.",
        "",
    ]


def _bar_line(name: str, bar: Mapping[str, Any]) -> str:
    if bar["figure"] is None:
        return f"| {bar['what']} | - | {_target(name)} | not measured |"
    verdict = "yes" if bar["met"] else "**no**"
    if not bar["complete"]:
        verdict = "not all cases measured"
    return f"| {bar['what']} | {bar['figure']:.2f} | {_target(name)} | {verdict} |"


def _target(name: str) -> str:
    bar = BARS[name]
    sign = ("&gt;" if bar.strict else "&ge;") if bar.at_least else "&le;"
    return f"{sign} {bar.bar:.2f}"


def _steps(results: Results) -> list[str]:
    """Tokens per second of the training steps."""
    rows = [r for r in results.rows if r.suite == "training_step" and r.tokens_per_second]
    if not rows:
        return []
    ways = list(dict.fromkeys(way for row in rows for way in row.tokens_per_second))
    ways.sort(key=lambda way: (way != "ours", way != "stock", way))
    lines = [
        "",
        f"| training step, tokens/s | {' | '.join(ways)} |",
        f"| --- |{' ---: |' * len(ways)}",
    ]
    for row in rows:
        shape = row.shape
        name = f"{shape['model']}, {shape['sequences']} x {shape['length']}"
        cells = [
            f"{row.tokens_per_second[way]:,.0f}" if way in row.tokens_per_second else "-"
            for way in ways
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _rollout(rows: Sequence[Row]) -> list[str]:
    """The rollout rows as a table, and the picture of a decode step where one was recorded."""
    if not rows:
        return []
    lines = ["", ABOUT_ROLLOUT, *rollout_markdown(rows)]
    if decode_profile.RESULTS.exists():
        lines += ["", "![One decode step, kernel by kernel](docs/img/decode_step.png)"]
    return lines


def _plots(results: Results) -> list[str]:
    measured = {row.suite for row in results.rows if row.ratio is not None}
    shown = [suite for suite in SHOWN if suite in measured]
    lines = [""] if shown else []
    return lines + [f"![{SHOWN[s]}: stock / ours](docs/img/bench_{s}.png)" for s in shown]


def current(readme: str) -> str:
    """What stands between the markers.

    Raises:
        ValueError: the markers are missing or repeated.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs exactly one {BEGIN} and one {END} after it.")
    return readme.split(BEGIN)[1].split(END)[0].strip("\n")


def rewritten(readme: str, text: str) -> str:
    """The README with the section replaced."""
    current(readme)
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    """Write or check; 1 when a check finds another text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    results, readme = load(RESULTS), README.read_text(encoding="utf-8")
    if args.check:
        same = current(readme) == section(results)
        print("README.md agrees" if same else "README.md differs: python -m benchmarks.readme")
        return 0 if same else 1
    README.write_text(rewritten(readme, section(results)), encoding="utf-8")
    if results.rows:
        IMAGES.mkdir(parents=True, exist_ok=True)
        save_plots(results, IMAGES)
    if decode_profile.RESULTS.exists():
        decode_profile.main([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
