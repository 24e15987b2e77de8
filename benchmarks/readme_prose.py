"""Figures in the README's own sentences, from benchmarks/results.

Usage: python -m benchmarks.readme_prose. Prints the phrases that the text behind the benchmark
section must hold, each marked if it does not. The sentences around them are written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.readme import END, README, RESULTS
from benchmarks.results_file import Results, Row, load

HOSTS = RESULTS.with_name("training_step_hosts.json")
PROFILE = RESULTS.with_name("training_profile.json")
VERIFY = RESULTS.with_name("h200_verify.json")
RECIPES = RESULTS.with_name("h200_recipes.json")
MATMUL_BAR = 0.93
FOUR_OF_8K = {"batch": 4, "context": 8192}


def phrases(results: Results) -> list[str]:
    """What the sentences must say of these results, whatever their line breaks."""
    of_results = (_products, _folds, _attention, _memory, _whole, _steps)
    return [
        *(phrase for make in of_results for phrase in make(results)),
        *_profile(_read(PROFILE)),
        *_verified(_read(VERIFY)),
        *_recipes(_read(RECIPES)),
    ]


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


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


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
        f"{_mean(results, 1, 1)} for one row",
        f"{_mean(results, 2, 256)} to 256 rows",
        f"{_mean(results, 512, 16_384)} from 512",
    ]


def _mean(results: Results, least: int, most: int) -> str:
    """Geometric means of the products of so many rows, forward and dX."""
    means = (
        geometric_mean(
            _ratios([r for r in _rows(results, suite) if least <= int(str(r.shape["m"])) <= most])
        )
        for suite in ("matmul_forward", "matmul_dx")
    )
    return " and ".join(f"{mean:.2f}" for mean in means)


def _folds(results: Results) -> list[str]:
    folds = _ratios(_rows(results, "gradient_fold"))
    few, many = (
        geometric_mean(_ratios(_rows(results, "gradient_fold", tokens=n))) for n in (1024, 16_384)
    )
    return [
        f"{sum(ratio < MATMUL_BAR for ratio in folds)} of {len(folds)} folds are below 0.93",
        f"the lowest at {min(folds):.2f} (1,024 x 1,024, 16k tokens)",
        f"from {few:.2f} at 1k tokens to {many:.2f} at 16k",
    ]


def _attention(results: Results) -> list[str]:
    backward = {
        f"{length // 1024}k": span(_ratios(_rows(results, "attention_backward", length=length)))
        for length in (2048, 4096, 8192, 16384)
    }
    decode = _rows(results, "attention_decode")
    few = [r for r in decode if r.shape["context"] == 32_768 and r.shape["batch"] in (1, 4)]
    some = [r for r in decode if r.shape["batch"] == 16 or r.shape == {**r.shape, **FOUR_OF_8K}]
    full = [r for r in decode if r.shape["batch"] in (64, 256)]
    ratios = _ratios(decode)
    mean, below = geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
    return [
        f"{below} of {len(ratios)} cases are below 1.00, their mean is {mean:.2f}",
        ", ".join(f"{length} {figures}" for length, figures in backward.items()),
        f"{span(_ratios(few))} for one or four of 32k",
        f"{span(_ratios(some))} for four of 8k and all of 16",
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
    liger = _peer_times(_rows(results, "token_logprobs"), "liger fp32")
    return [
        f"takes {span(liger, digits=1)} times as long as ours",
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
    before = [run for run in _read(HOSTS)["runs"] if run["kernels_sha256"] != kernels]

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


def _steps(results: Results) -> list[str]:
    def peaks(way: str) -> list[str]:
        rows = _rows(results, "training_step", sequences=16)
        return [f"{row.peak_bytes[way] / 2**30:.1f}" for row in rows]

    (ours, ours_large), (liger, liger_large), (stock, stock_large) = map(
        peaks, ("ours", "liger", "stock")
    )
    (grpo,) = _rows(results, "rollout_grpo_step")
    training = (float(grpo.figures[f"{way}/training_seconds"]) for way in ("stock", "strict"))
    stock_seconds, seconds = training
    assert grpo.ratio is not None
    return [
        f"is {ours} and {ours_large} GiB, Liger's {liger} and {liger_large}, "
        f"stock's {stock} and {stock_large}",
        f"training {stock_seconds / seconds:.2f} times, all of it {grpo.ratio:.2f}",
    ]


def _profile(profile: dict[str, Any]) -> list[str]:
    def milliseconds(way: str) -> list[tuple[str, str, str]]:
        steps = [profile["steps"][model][way] for model in ("qwen3-0.6b", "qwen3-1.7b")]
        spent = [(s["idle_us"], s["step_us"], s["step_us"] - s["idle_us"]) for s in steps]
        return [(f"{a / 1e3:.0f}", f"{b / 1e3:.0f}", f"{c / 1e3:.0f}") for a, b, c in spent]

    (small, large), (liger, liger_large) = milliseconds("ours"), milliseconds("liger")
    return [
        f"waited {small[0]} of {small[1]} ms at 0.6B and {large[0]} of {large[1]} at 1.7B, "
        f"Liger's {liger[0]} and {liger_large[0]}",
        f"take {small[2]} and {large[2]} ms, Liger's {liger[2]} and {liger_large[2]}",
    ]


def _verified(runs: dict[str, Any]) -> list[str]:
    claims, mutants, tests, before = runs["runs"]
    assert claims["passed"] and mutants["passed"] and not tests["failed"] + tests["skipped"]
    return [
        f"green there: {claims['checks']} checks",
        f"{claims['comparisons']:,} comparisons in {claims['seconds']:.0f} s",
        f"with the kernels before {before['seconds']:.0f} s",
        f"All {mutants['caught']} negative controls are caught ({mutants['seconds']:.0f} s",
        f"all {tests['passed']:,} GPU tests passed in one run of {tests['seconds']:.0f} s",
    ]


def _recipes(record: dict[str, Any]) -> list[str]:
    tiny, large = record["runs"]

    def rates(run: dict[str, Any], what: str) -> str:
        ours, stock = (run[f"time/{who}{what}_tokens_per_second"] for who in ("", "stock_"))
        return f"{ours:,.0f} against {stock:,.0f}"

    rollout = rates(large, "rollout").replace(" against", " tokens a second against")
    return [
        f"{large['consistency/mismatched_tokens']} of {large['consistency/tokens']:,} tokens "
        "differed",
        f"where stock had {large['stock/mismatched_tokens']:,}",
        f"{tiny['consistency/mismatched_tokens']} of {tiny['consistency/tokens']:,} in the "
        f"arithmetic task (stock: {tiny['stock/mismatched_tokens']:,} of {tiny['stock/tokens']:,})",
        f"made {rollout}, training {rates(large, 'training')}",
        f"with its tiny model, {rates(tiny, 'rollout')} and {rates(tiny, 'training')}",
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
