"""What a benchmark found: rows, the bars they are held against, and the file both are kept in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from rl_consistency.cli.json_value import require_type
from rl_consistency.cli.output_file import write_whole

Shape = Mapping[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. Times are medians in microseconds; None where nothing was timed."""

    suite: str
    work: str
    """What was computed, such as `matmul forward`."""
    shape: Shape
    dtype: str
    ours_us: float | None = None
    stock_us: float | None = None
    """The fastest of the stock ways."""
    stock: str | None = None
    """Its name, where there are several."""
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
    """What else was measured or is to be said, by name."""
    error_ratio: float | None = None
    """Our error against fp64 over stock's."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Stock ways and peers that do not run here, and why."""
    error: str | None = None
    """Why there is no measurement."""


@dataclass(frozen=True)
class Bar:
    """A target: how its figure is computed from rows, and the value to reach."""

    what: str
    suites: tuple[str, ...]
    figure: Callable[[Sequence[Row]], float | None]
    bar: float
    at_least: bool = True
    strict: bool = False
    """Whether reaching the bar exactly is not enough ("faster than")."""

    def reached(self, figure: float | None) -> bool:
        """Whether the figure meets the bar; no figure does not."""
        if figure is None or not math.isfinite(figure):
            return False
        if self.strict and figure == self.bar:
            return False
        return figure >= self.bar if self.at_least else figure <= self.bar


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def _ratios(rows: Sequence[Row], work: str = "") -> list[float]:
    return [r.ratio for r in rows if r.ratio is not None and r.work.startswith(work)]


def _lowest(work: str = "") -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: min(_ratios(rows, work), default=None)


def _geomean(rows: Sequence[Row]) -> float | None:
    return geometric_mean(_ratios(rows))


def _bandwidth(rows: Sequence[Row]) -> float | None:
    """The lowest share of the copy bandwidth at 8k x 4096 and up."""
    big = [r for r in rows if int(r.shape["tokens"]) >= 8192 and int(r.shape["width"]) >= 4096]
    return min((r.ceiling_fraction for r in big if r.ceiling_fraction is not None), default=None)


def _against_peer(peer: str) -> Callable[[Sequence[Row]], float | None]:
    """The lowest peer time / our time; None unless every row has the peer."""

    def figure(rows: Sequence[Row]) -> float | None:
        timed = [r for r in rows if r.ours_us is not None]
        if not timed or any(peer not in r.peers for r in timed):
            return None
        return min(r.peers[peer] / r.ours_us for r in timed if r.ours_us)

    return figure


def _memory_against(peer: str) -> Callable[[Sequence[Row]], float | None]:
    """The highest peak of ours / the peer's; None unless every row has both."""

    def figure(rows: Sequence[Row]) -> float | None:
        timed = [r for r in rows if r.ours_us is not None]
        if not timed or any(not {"ours", peer} <= r.peak_bytes.keys() for r in timed):
            return None
        return max(r.peak_bytes["ours"] / r.peak_bytes[peer] for r in timed)

    return figure


def _highest_figure(name: str) -> Callable[[Sequence[Row]], float | None]:
    """The highest of one of the rows' further figures."""
    return lambda rows: max(
        (float(r.figures[name]) for r in rows if name in r.figures), default=None
    )


def _lowest_share(rows: Sequence[Row]) -> float | None:
    return min((r.ceiling_fraction for r in rows if r.ceiling_fraction is not None), default=None)


def _stock_drifts(rows: Sequence[Row]) -> float | None:
    """Mismatched tokens of strict; infinite where stock has none, for then nothing was shown."""
    strict, stock = (_highest_figure(f"{m}/mismatched_tokens")(rows) for m in ("strict", "stock"))
    return strict if stock is None or stock > 0 else math.inf


def _largest_error(rows: Sequence[Row]) -> float | None:
    return max((r.error_ratio for r in rows if r.error_ratio is not None), default=None)


_MATMUL = ("matmul_forward", "matmul_dx")
_PREFILL = ("attention_forward", "attention_backward")
_DECODE = tuple(f"rollout_decode_{name}" for name in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))

BARS: Mapping[str, Bar] = {
    "matmul_geomean": Bar(
        "matmul forward and dX against default cuBLAS, geometric mean", _MATMUL, _geomean, 1.00
    ),
    "matmul_lowest": Bar("matmul forward and dX, the lowest", _MATMUL, _lowest(), 0.93),
    "gradient_fold_geomean": Bar(
        "dW fold against cuBLAS fp32-out + add, geometric mean", ("gradient_fold",), _geomean, 0.95
    ),
    "attention_forward": Bar(
        "attention prefill forward against the better of SDPA flash and cuDNN, the lowest",
        _PREFILL[:1],
        _lowest(),
        0.85,
    ),
    "attention_backward": Bar(
        "attention prefill backward, the lowest", _PREFILL[1:], _lowest(), 0.80
    ),
    "attention_decode": Bar(
        "paged decode against the better SDPA backend on contiguous KV, the lowest",
        ("attention_decode",),
        _lowest(),
        1.00,
    ),
    "elementwise_bandwidth": Bar(
        "RMSNorm, rotary, SwiGLU, embedding at 8k x 4096 and up: share of copy bandwidth, the "
        "lowest",
        ("elementwise",),
        _bandwidth,
        0.85,
    ),
    "elementwise_eager": Bar(
        "the same against eager torch, the lowest", ("elementwise",), _lowest(), 1.00, strict=True
    ),
    "token_logprobs_stock": Bar(
        "token_logprobs forward + backward against log_softmax of full logits, the lowest",
        ("token_logprobs",),
        _lowest(),
        1.00,
        strict=True,
    ),
    "token_logprobs_liger": Bar(
        "the same against Liger's fused linear cross-entropy, the lowest",
        ("token_logprobs",),
        _against_peer("liger"),
        1.00,
        strict=True,
    ),
    "token_logprobs_memory": Bar(
        "peak memory of token_logprobs / Liger's (gradient in bf16), the highest",
        ("token_logprobs",),
        _memory_against("liger"),
        1.00,
        at_least=False,
    ),
    "token_logprobs_memory_fp32": Bar(
        "peak memory of token_logprobs / Liger's with its gradient in fp32 as ours, the highest",
        ("token_logprobs",),
        _memory_against("liger fp32"),
        1.00,
        at_least=False,
    ),
    "training_step_stock": Bar(
        "training step against Hugging Face with SDPA, the lowest",
        ("training_step",),
        _lowest(),
        1.15,
    ),
    "training_step_liger": Bar(
        "training step against Hugging Face patched by Liger-Kernel, the lowest",
        ("training_step",),
        _against_peer("liger"),
        1.00,
    ),
    "accuracy": Bar(
        "error against fp64 / stock's error over 512 tokens, the highest of all ops",
        ("accuracy",),
        _largest_error,
        1.05,
        at_least=False,
    ),
    "rollout_decode": Bar(
        "decode throughput, 256 sequences, against the same engine with stock ops, the lowest",
        _DECODE,
        _lowest(),
        0.97,
    ),
    "rollout_hugging_face": Bar(
        "new tokens per second against Hugging Face generate and generate_batch, the lowest",
        ("rollout_hugging_face",),
        _lowest(),
        10.0,
    ),
    "rollout_public": Bar(
        "new tokens per second against vLLM's batch-invariant mode",
        ("rollout_public",),
        _against_peer("vllm batch-invariant"),
        1.00,
    ),
    "rollout_roofline": Bar(
        "decode step at the 8B shape, batch 64 to 256: share of copy bandwidth, the lowest",
        ("rollout_roofline",),
        _lowest_share,
        0.65,
    ),
    "rollout_idle": Bar(
        "GPU idle in decoding at batch 32 and more, share of the time, the highest",
        ("rollout_idle",),
        _highest_figure("idle_share"),
        0.05,
        at_least=False,
        strict=True,
    ),
    "rollout_speculation": Bar(
        "n-gram speculation on a copied text, batch 1 and 8, against plain decoding, the lowest",
        ("rollout_speculation",),
        _lowest(),
        1.50,
    ),
    "rollout_long_context": Bar(
        "time of a token of one sequence at 32k tokens of context / at 1k",
        ("rollout_long_context",),
        _highest_figure("times_short"),
        1.60,
        at_least=False,
    ),
    "rollout_grpo_step": Bar(
        "GRPO step (rollout, forward, backward, update) against stock ops",
        ("rollout_grpo_step",),
        _lowest(),
        0.97,
    ),
    "rollout_grpo_drift": Bar(
        "mismatched tokens of those steps, where stock has some",
        ("rollout_grpo_step",),
        _stock_drifts,
        0.0,
        at_least=False,
    ),
}
"""Name to target. "The lowest" is over every row of the suites, so that no row can hide."""


def judge(rows: Sequence[Row], complete: Mapping[str, bool]) -> dict[str, dict[str, Any]]:
    """Every bar's figure, and whether it is met.

    Args:
        rows: all rows there are.
        complete: suite to whether all of its rows were measured without an error. A bar over a
            suite that is absent or incomplete is not met, whatever its figure.

    Returns:
        name -> {what, figure, bar, at_least, complete, met}.
    """
    found = {}
    for name, bar in BARS.items():
        figure = bar.figure([r for r in rows if r.suite in bar.suites])
        whole = all(complete.get(suite, False) for suite in bar.suites)
        found[name] = {
            "what": bar.what,
            "figure": figure,
            "bar": bar.bar,
            "at_least": bar.at_least,
            "complete": whole,
            "met": whole and bar.reached(figure),
        }
    return found


@dataclass(frozen=True)
class Results:
    """The content of a results file."""

    rows: tuple[Row, ...]
    meta: Mapping[str, Any]
    """Device, versions, commit and kernel hash of the latest run, and `suites`: those of each."""

    @property
    def bars(self) -> dict[str, dict[str, Any]]:
        """See `judge`."""
        suites = self.meta.get("suites", {})
        return judge(self.rows, {name: record["complete"] for name, record in suites.items()})

    def merged(
        self, suite: str, rows: Sequence[Row], meta: Mapping[str, Any], record: Mapping[str, Any]
    ) -> Results:
        """With one suite's rows and record replaced, where they stood, and the run's meta over the
        old one's."""
        first = next((i for i, r in enumerate(self.rows) if r.suite == suite), len(self.rows))
        after = (r for r in self.rows[first:] if r.suite != suite)
        suites = {**self.meta.get("suites", {}), suite: dict(record)}
        merged = (*self.rows[:first], *rows, *after)
        return Results(merged, {**self.meta, **meta, "suites": suites})


def load(path: Path, device: str | None = None) -> Results:
    """Read a results file; an absent one is empty.

    Args:
        path: the file.
        device: name of the device about to be measured; None accepts any.

    Raises:
        ValueError: the file is damaged, or holds another device's results.
    """
    if not path.exists():
        return Results((), {})
    try:
        results = _parsed(json.loads(path.read_text(encoding="utf-8")))
        # Rows that a bar cannot read would stop every later `save`.
        judge(results.rows, {})
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no results file of `rl-consistency bench`: {error}") from error
    recorded = results.meta.get("device")
    if device is not None and recorded not in (None, device):
        raise ValueError(
            f"{path} holds results of {recorded!r} and this is {device!r}; give another --json."
        )
    return results


def _parsed(content: Any) -> Results:
    """What `save` wrote.

    Raises:
        TypeError: a part is missing, unknown or of another type.
    """
    require_type("the content", content, dict)
    if unknown := content.keys() - {"rows", "bars", "meta"}:
        raise TypeError(f"unknown {', '.join(sorted(unknown))}")
    rows, meta = content.get("rows"), content.get("meta")
    require_type("rows", rows, list)
    require_type("meta", meta, dict)
    require_type("bars", content.get("bars", {}), dict)
    suites = meta.get("suites", {})
    require_type("meta.suites", suites, Mapping[str, dict])
    for name, record in suites.items():
        require_type(f"meta.suites.{name}.complete", record.get("complete"), bool)
    kinds = get_type_hints(Row)
    for i, row in enumerate(rows):
        require_type(f"row {i}", row, dict)
        for name in row.keys() & kinds.keys():
            require_type(f"{name} of row {i}", row[name], kinds[name])
    return Results(tuple(Row(**row) for row in rows), meta)


def save(path: Path, results: Results) -> None:
    """Write a results file in one piece."""
    content = {
        "rows": [asdict(row) for row in results.rows],
        "bars": results.bars,
        "meta": dict(results.meta),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")
