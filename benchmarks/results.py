"""What the benches found: rows, the bars they are held against, and the file that keeps both."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import BANDS
from rl_consistency.cli.output_file import write_whole

Shape = Mapping[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Times are medians in microseconds; None where nothing was timed."""

    suite: str
    work: str
    """What was computed, such as `matmul forward`."""
    shape: Shape = field(default_factory=dict)
    dtype: str
    ours_us: float | None = None
    stock_us: float | None = None
    """The fastest of the stock ways."""
    stock: str | None = None
    """Its name."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """Name to microseconds: public projects, and every stock way where there are several."""
    ratio: float | None = None
    """stock_us / ours_us."""
    ceiling_fraction: float | None = None
    """Time at the measured ceiling (copy bandwidth or large matmul, the slower) / ours_us."""
    schedule: str | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Name to bytes allocated at the peak beyond the operands; `ours`, `stock` and peers."""
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """Further figures by name."""
    error_ratio: float | None = None
    """Our error against fp64 over stock's."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Stock ways and peers that do not run here, and why."""
    error: str | None = None
    """Why there is no measurement."""

    @property
    def case(self) -> str:
        """What was measured, in one line."""
        sizes = (f"{name}={size}" for name, size in self.shape.items())
        return " ".join((f"{self.suite}: {self.work} {self.dtype}", *sizes))


Figure = Callable[[Sequence[Row]], float | None]
"""The figure of a bar from the rows of its suites; None where they do not give one."""


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def ratios(rows: Sequence[Row]) -> list[float]:
    """Stock time / our time of every row that has it."""
    return [row.ratio for row in rows if row.ratio is not None]


def _of_all(pick: Callable[..., Any], value: Callable[[Row], float | None]) -> Figure:
    """The lowest or highest value of the rows without an error; None unless each of them has it."""

    def figure(rows: Sequence[Row]) -> float | None:
        found = [value(row) for row in rows if row.error is None]
        return pick(found) if found and None not in found else None

    return figure


def _geomean(rows: Sequence[Row]) -> float | None:
    return geometric_mean(ratios(rows))


def _bandwidth(rows: Sequence[Row]) -> float | None:
    """The lowest share of the copy bandwidth of wide rows; narrow ones are left out."""
    return _lowest_share([row for row in rows if int(row.shape["width"]) >= 4096])


def _highest(name: str) -> Figure:
    """The highest of one of the rows' further figures."""
    return _of_all(max, lambda row: float(row.figures[name]) if name in row.figures else None)


def _of_strategies(zero: bool, name: str) -> Figure:
    """The highest of a further figure, of DeepSpeed's strategies or of the others."""
    highest = _highest(name)
    return lambda rows: highest(
        [r for r in rows if str(r.shape["strategy"]).startswith("zero") == zero]
    )


def _scaling(rows: Sequence[Row]) -> float | None:
    """The lowest of completions of 1,024 tokens; the host's share of shorter steps is larger."""
    long = [row for row in rows if int(row.shape["new_tokens"]) >= 1024]
    return _of_all(min, lambda row: float(row.figures["scaling"]))(long)


def _peak_against(peer: str) -> Figure:
    """The highest peak of ours / the peer's."""
    return _of_all(
        max, lambda r: r.peak_bytes["ours"] / p if (p := r.peak_bytes.get(peer)) else None
    )


def _liger_ratio(row: Row) -> float | None:
    return row.peers["liger"] / row.ours_us if row.ours_us and "liger" in row.peers else None


def _stock_drifts(rows: Sequence[Row]) -> float | None:
    """Mismatched tokens of strict; infinite where stock has none, because then nothing is shown."""
    strict, stock = (_highest(f"{m}/mismatched_tokens")(rows) for m in ("strict", "stock"))
    return strict if stock is None or stock > 0 else math.inf


def _in_band(low: int, high: int, figure: Figure) -> Figure:
    """A figure of the rows with so many rows of a matmul."""
    return lambda rows: figure([row for row in rows if low <= int(row.shape["m"]) <= high])


_lowest = _of_all(min, lambda r: r.ratio)
_lowest_share = _of_all(min, lambda r: r.ceiling_fraction)
_largest_error = _of_all(max, lambda r: r.error_ratio)
_against_liger = _of_all(min, _liger_ratio)

COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Bar:
    """A target: `figure`, computed from the rows of some suites, compared with `bar` by `sign`."""

    what: str
    sign: str
    bar: float
    suites: tuple[str, ...]
    figure: Figure = _lowest


_MATMUL = ("matmul_forward", "matmul_dx")
_LOGPROBS, _ROWS, _STEP = ("token_logprobs",), ("elementwise",), ("training_step",)
_DECODE = tuple(f"rollout_decode_{model}" for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))
_GRPO, _START = ("rollout_grpo_step",), ("rollout_cold_start",)
_SUM, _RANKS, _SCALING = ("distributed_sum",), ("distributed_step",), ("distributed_grpo",)
_TRL = ("trl_grpo",)

_RANDOM_PRODUCTS = ("matmul_random",)

# The formatter would give each argument a line.
# fmt: off
_RANDOM: Mapping[str, Bar] = {
    f"matmul_random_{low}_{name}": Bar(
        f"random products of {low} to {high} rows against cuBLAS, {text}", ">=", target,
        _RANDOM_PRODUCTS, _in_band(low, high, figure))
    for low, high in BANDS
    for name, text, target, figure in (
        ("geomean", "geometric mean", 1.0, _geomean), ("lowest", "lowest", 0.85, _lowest))
} | {
    "gradient_fold_random": Bar(
        "random dW folds against cuBLAS + add, geometric mean", ">=", 0.95,
        ("gradient_fold_random",), _geomean),
    "attention_forward_random": Bar(
        "random attention forward against the best SDPA, lowest", ">=", 0.85,
        ("attention_forward_random",)),
    "attention_backward_random": Bar(
        "random attention backward against the best SDPA, lowest", ">=", 0.8,
        ("attention_backward_random",)),
    "attention_decode_random": Bar(
        "random paged decode against SDPA on contiguous KV, lowest", ">=", 0.95,
        ("attention_decode_random",)),
    "elementwise_random": Bar(
        "random memory-bound ops against eager torch, lowest", ">", 1.0, ("elementwise_random",)),
    "token_logprobs_random": Bar(
        "random token_logprobs against log_softmax of full logits, lowest", ">", 1.0,
        ("token_logprobs_random",)),
    "accuracy_random": Bar(
        "random sizes: error against fp64 / stock's, highest of all ops", "<=", 1.05,
        ("accuracy_random",), _largest_error),
    "rollout_decode_random": Bar(
        "random models: decoding against the same engine with stock ops", ">=", 0.97,
        ("rollout_decode_random",)),
} | {
    f"training_step_{kind}_{name}": Bar(
        f"training step of {text} models against {against}, lowest", ">=", target,
        (f"training_step_{kind}",), figure)
    for kind, text in (("random", "random"), ("named", "other named"))
    for name, against, target, figure in (
        ("stock", "Hugging Face with SDPA", 1.15, _lowest), ("liger", "Liger", 1.0, _against_liger))
}

BARS: Mapping[str, Bar] = {
    "matmul_geomean": Bar(
        "matmul forward and dX against cuBLAS, geometric mean", ">=", 1.0, _MATMUL, _geomean),
    "matmul_lowest": Bar("matmul forward and dX against cuBLAS, lowest", ">=", 0.93, _MATMUL),
    "gradient_fold_geomean": Bar(
        "dW fold against cuBLAS + add, geometric mean", ">=", 0.95, ("gradient_fold",), _geomean),
    "attention_forward": Bar(
        "attention forward against the best SDPA, lowest", ">=", 0.85, ("attention_forward",)),
    "attention_backward": Bar(
        "attention backward against the best SDPA, lowest", ">=", 0.8, ("attention_backward",)),
    "attention_decode": Bar(
        "paged decode against SDPA on contiguous KV, lowest", ">=", 1.0, ("attention_decode",)),
    "elementwise_bandwidth": Bar(
        "memory-bound ops: share of a copy's bandwidth", ">=", 0.85, _ROWS, _bandwidth),
    "elementwise_eager": Bar("memory-bound ops against eager torch, lowest", ">", 1.0, _ROWS),
    "token_logprobs_stock": Bar(
        "token_logprobs against log_softmax of full logits, lowest", ">", 1.0, _LOGPROBS),
    "token_logprobs_liger": Bar(
        "token_logprobs against Liger, lowest", ">", 1.0, _LOGPROBS, _against_liger),
    "token_logprobs_memory": Bar(
        "its peak memory / Liger's", "<=", 1.0, _LOGPROBS, _peak_against("liger")),
    "token_logprobs_memory_fp32": Bar(
        "its peak memory / Liger's in fp32", "<=", 1.0, _LOGPROBS, _peak_against("liger fp32")),
    "training_step_stock": Bar(
        "training step against Hugging Face with SDPA, lowest", ">=", 1.15, _STEP),
    "training_step_liger": Bar(
        "training step against Liger, lowest", ">=", 1.0, _STEP, _against_liger),
    "accuracy": Bar(
        "error against fp64 / stock's, highest of all ops", "<=", 1.05, ("accuracy",),
        _largest_error),
    "rollout_decode": Bar(
        "decoding 256 sequences against the same engine with stock ops", ">=", 0.97, _DECODE),
    "rollout_hugging_face": Bar(
        "generation against Hugging Face, lowest", ">=", 10.0, ("rollout_hugging_face",)),
    "rollout_roofline": Bar(
        "8B decode step: share of a copy's bandwidth", ">=", 0.65, ("rollout_roofline",),
        _lowest_share),
    "rollout_roofline_named": Bar(
        "the same of other models, 64 and 256 sequences, lowest", ">=", 0.65,
        ("rollout_roofline_named",), _lowest_share),
    "rollout_idle": Bar(
        "GPU idle in decoding, share of the time", "<", 0.05, ("rollout_idle",),
        _highest("idle_share")),
    "rollout_shared_keys": Bar(
        "groups of 8, 2k prompts read once against by each", ">=", 1.5, ("rollout_shared_keys",)),
    "rollout_speculation": Bar(
        "n-gram speculation on a copied text against plain", ">=", 1.5, ("rollout_speculation",)),
    "rollout_long_context": Bar(
        "a token at 32k / at 1k of context", "<=", 1.6, ("rollout_long_context",),
        _highest("times_short")),
    "rollout_grpo_step": Bar("GRPO step against stock ops", ">=", 0.97, _GRPO),
    "rollout_grpo_drift": Bar(
        "mismatched tokens of those steps", "<=", 0.0, _GRPO, _stock_drifts),
    "rollout_cold_start": Bar(
        "seconds to a new process's first token, empty caches", "<=", 15.0, _START,
        _highest("cold/first_token_seconds")),
    "rollout_warm_start": Bar(
        "the same, kernels on disk", "<=", 3.0, _START, _highest("warm/first_token_seconds")),
    "distributed_sum": Bar(
        "NCCL's fp32 reduce-scatter against all-to-all and sum, lowest", ">=", 0.8, _SUM),
    "distributed_step": Bar(
        "optimizer step on several GPUs / with NCCL's sum, highest", "<=", 1.05, _RANKS,
        _of_strategies(False, "times_stock")),
    "distributed_step_zero": Bar(
        "the same under DeepSpeed", "<=", 1.1, _RANKS, _of_strategies(True, "times_stock")),
    "distributed_memory": Bar(
        "peak memory of that step, less the carry / with NCCL's sum, highest", "<=", 1.05, _RANKS,
        _highest("memory_times_stock")),
    "distributed_grpo": Bar(
        "GRPO tokens a second on several GPUs / on one, long completions, lowest", ">=", 1.8,
        _SCALING, _scaling),
    "trl_step": Bar("TRL's GRPO step as it comes / attached", ">=", 3.0, _TRL),
    "trl_training": Bar(
        "its training part as it comes / attached", ">=", 1.0, _TRL,
        _of_all(min, lambda row: float(row.figures["training_ratio"]))),
    "trl_memory": Bar(
        "peak of that part / TRL's with fp32 gradients", "<=", 1.05, _TRL,
        _highest("memory_times_trl_defaults")),
    "trl_drift": Bar("mismatched tokens of those steps", "<=", 0.0, _TRL, _stock_drifts),
    "trl_recipe": Bar(
        "an attached step / one of our own recipe", "<=", 1.1, _TRL, _highest("times_own_recipe")),
    "trl_monitor": Bar(
        "share of the drift monitor in that step", "<=", 0.01, _TRL, _highest("monitor_share")),
    "trl_gradient_check": Bar(
        "share of a gradient check every 10 steps", "<=", 0.05, _TRL,
        _highest("gradient_check_share")),
    **_RANDOM,
}
"""Name to target. The lowest or highest is over every row of the suites: no row can hide."""
# fmt: on


@dataclass(frozen=True)
class Results:
    """The content of a results file."""

    rows: tuple[Row, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Device, versions, commit and kernels hash of the latest run, and `suites`: those of each."""

    @property
    def bars(self) -> dict[str, dict[str, Any]]:
        """Every bar's figure and whether it is met: name -> {what, figure, sign, bar, complete,
        met}.

        A bar over a suite that is absent, or has a row with an error, is not met.
        """
        found, suites = {}, self.meta.get("suites", {})
        for name, bar in BARS.items():
            figure = bar.figure(self.of(*bar.suites))
            whole = all(suite in suites and suites[suite]["complete"] for suite in bar.suites)
            reached = COMPARISONS[bar.sign]
            met = figure is not None and math.isfinite(figure) and reached(figure, bar.bar)
            found[name] = {"what": bar.what, "figure": figure, "sign": bar.sign, "bar": bar.bar}
            found[name] |= {"complete": whole, "met": whole and met}
        return found

    def of(self, *suites: str) -> list[Row]:
        """Rows of some suites."""
        return [row for row in self.rows if row.suite in suites]

    def merged(
        self, suite: str, rows: Sequence[Row], meta: Mapping[str, Any], record: Mapping[str, Any]
    ) -> Results:
        """With the rows and the record of one suite replaced in their place, and the run's meta
        over the old one."""
        first = next((i for i, r in enumerate(self.rows) if r.suite == suite), len(self.rows))
        after = (r for r in self.rows[first:] if r.suite != suite)
        suites = {**self.meta.get("suites", {}), suite: dict(record)}
        merged = (*self.rows[:first], *rows, *after)
        return Results(merged, {**self.meta, **meta, "suites": suites})


def load(path: Path, device: str | None = None) -> Results:
    """Read a results file; an absent one is empty. ValueError where it is damaged, or holds results
    of another device than `device`."""
    if not path.exists():
        return Results()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results = Results(tuple(Row(**row) for row in content["rows"]), content["meta"])
        recorded = results.meta["device"]
    except (LookupError, TypeError, ValueError) as error:
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
    write_whole(path, f'{{\n "rows": [\n  {listed}\n ],\n{rest[2:]}\n')


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
