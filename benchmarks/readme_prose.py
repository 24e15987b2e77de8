"""Figures in the README's own sentences, from benchmarks/results.

Usage: python -m benchmarks.readme_prose. Prints the phrases that the text behind the benchmark
section must hold, each marked if it does not. The sentences around them are written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.readme import END, README, RESULTS
from rl_consistency.cli.bench_results import Results, Row, load

HOSTS = RESULTS.with_name("training_step_hosts.json")
MATMUL_BAR = 0.93


def phrases(results: Results) -> list[str]:
    """What the sentences must say of these results, whatever their line breaks."""
    return [*_products(results), *_attention(results), *_memory(results), *_whole(results)]


def missing(readme: str, results: Results) -> list[str]:
    """Phrases that the text behind the benchmark section lacks."""
    text = " ".join(readme.split(END)[1].split())
    return [
        phrase
        for phrase in phrases(results)
        if not re.search(rf"(?<![\w.]){re.escape(phrase)}(?!\w)", text)
    ]


def span(figures: Iterable[float], digits: int = 2) -> str:
    """The lowest and the highest, once where they read the same."""
    values = list(figures)
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _rows(results: Results, suite: str, **shape: Any) -> list[Row]:
    """The rows of a suite, or of all whose name begins so, whose shapes hold the values."""
    return [
        row
        for row in results.rows
        if row.suite.startswith(suite)
        and all(row.shape.get(name) == value for name, value in shape.items())
    ]


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [row.ratio for row in rows if row.ratio is not None]


def _peer_times(rows: Sequence[Row], peer: str) -> list[float]:
    """A peer's times in ours."""
    return [row.peers[peer] / row.ours_us for row in rows if row.ours_us and peer in row.peers]


def _products(results: Results) -> list[str]:
    few = [
        row
        for row in _rows(results, "matmul_dx", k=151_936)
        if isinstance(row.shape["m"], int) and row.shape["m"] <= 512
    ]
    narrow, wide = (_ratios([r for r in few if r.shape["n"] == n]) for n in (1024, 4096))
    others = _ratios([row for row in _rows(results, "matmul_") if row not in few])
    reached = [ratio for ratio in others if ratio >= MATMUL_BAR]
    all_of_them = len(reached) == len(others)
    some = f"All {len(others)}" if all_of_them else f"{len(reached)} of the {len(others)}"
    return [
        f"{span(narrow)} at width 1,024",
        f"{span(r for r in wide if r < MATMUL_BAR)} at 4,096",
        f"{some} other products",
        f"the lowest at {min(others):.2f}",
    ]


def _attention(results: Results) -> list[str]:
    backward = {
        f"{length // 1024}k": span(_ratios(_rows(results, "attention_backward", length=length)))
        for length in (2048, 4096, 8192, 16384)
    }
    decode = _rows(results, "attention_decode")
    few = [r for r in decode if r.shape["context"] == 32_768 and r.shape["batch"] in (1, 4)]
    some = [
        r
        for r in decode
        if (r.shape["batch"], r.shape["context"]) in ((4, 8192), (16, 2048), (16, 8192))
    ]
    full = [r for r in decode if r.shape["batch"] in (64, 256)]
    return [
        ", ".join(f"{length} {figures}" for length, figures in backward.items()),
        f"{span(_ratios(few))} for one or four of 32k",
        f"{span(_ratios(some))} for four of 8k and 16 of 2k and 8k",
        f"{span(_ratios(full))} for 64 and 256",
        f"{span(r.ceiling_fraction or 0.0 for r in full)} of a copy's bandwidth",
    ]


def _memory(results: Results) -> list[str]:
    rows = [r for r in _rows(results, "elementwise", width=4096) if r.ceiling_fraction is not None]

    def shares(work: str) -> list[float]:
        return [row.ceiling_fraction or 0.0 for row in rows if row.work == work]

    norms = shares("rms_norm backward") + shares("add_rms_norm backward")
    peaks = [
        row.peak_bytes["ours"] / row.peak_bytes["liger fp32"]
        for row in _rows(results, "token_logprobs")
        if "liger fp32" in row.peak_bytes
    ]
    return [
        f"backward of the norms {span(norms)}",
        f"the embedding's gradient {span(shares('embedding gradient'))}",
        f"its gather {span(shares('embedding'))}",
        f"the norm at 8k tokens {min(shares('rms_norm')):.2f}",
        f"rotary's backward there {min(shares('rotary backward')):.2f}",
        f"{span(peaks)} times Liger's with fp32 accumulation",
    ]


def _whole(results: Results) -> list[str]:
    def against_liger(model: str) -> str:
        return span(_peer_times(_rows(results, "training_step", model=model), "liger"))

    generate = {
        row.shape["model"]: f"{row.ratio:.1f}"
        for row in _rows(results, "rollout_hugging_face")
        if row.work == "generate" and row.ratio is not None
    }
    kernels = results.meta["suites"]["training_step"]["kernels_sha256"]
    runs = json.loads(HOSTS.read_text(encoding="utf-8"))["runs"]
    before = [run for run in runs if run["kernels_sha256"] != kernels]

    def over_hosts(model: str) -> str:
        rows = [row for run in before for row in run["rows"] if row["shape"]["model"] == model]
        return span(row["liger_us"] / row["ours_us"] for row in rows)

    (long,) = _rows(results, "rollout_long_context")
    products = _peer_times(_rows(results, "matmul_forward"), "batch_invariant_ops")
    steps = _peer_times(_rows(results, "training_step"), "batch_invariant_ops")
    return [
        f"0.6B: {against_liger('qwen3-0.6b')}, 1.7B: {against_liger('qwen3-1.7b')}",
        f"it was {over_hosts('qwen3-0.6b')} and {over_hosts('qwen3-1.7b')}",
        f"{geometric_mean(products):.2f} times as long as ours over {len(products)} shapes",
        f"geometric mean; {span(products)}",
        f"in its mode {span(steps)} times",
        f"0.6B: {generate['qwen3-0.6b']}, 1.7B: {generate['qwen3-1.7b']}",
        f"32k against 1k keys** ({float(long.figures['times_short']):.2f})",
    ]


def main() -> int:
    """Print all phrases; 1 when one is missing."""
    results, readme = load(RESULTS), README.read_text(encoding="utf-8")
    lacking = missing(readme, results)
    for phrase in phrases(results):
        print("missing" if phrase in lacking else "there  ", phrase)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
