"""Launches and the tables of their schedules: the walks of `verify` and the works of `tune`.

Every schedule of a launch must give the same bytes, and so must its `ways`. Scales keep results
within fp16 where outliers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.case import EPS, Op, Setting, weight_scale
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES, has_tma, sm_count
from rl_consistency.kernels.gradient_fold import outer_triton, rows_triton
from rl_consistency.kernels.gradient_fold import schedules as folds
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.linear import few_rows_triton
from rl_consistency.kernels.linear import schedules as few_rows
from rl_consistency.kernels.matmul import schedules as products
from rl_consistency.kernels.matmul.cublaslt import library_outer, library_product
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, matmul_fwd
from rl_consistency.kernels.pointwise import glu, rotary
from rl_consistency.kernels.rms_norm import schedules as rms_norm
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd, rms_norm_fwd
from rl_consistency.kernels.sampling.statistics_triton import vocabulary_combine
from rl_consistency.kernels.token_logprobs import schedules as logprobs
from rl_consistency.kernels.token_logprobs.head_triton import (
    token_gradient,
    token_gradient_table,
    token_statistics,
)
from rl_consistency.kernels.token_logprobs.lm_head import IGNORED


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch at one size."""

    name: str
    operands: Callable[[], tuple[Tensor, ...]]
    """Makes the operands, with the same values at each call."""
    run: Callable[..., Any]
    """(schedule, *operands) -> a tensor or a tuple of tensors; it may write into its operands."""
    schedules: Sequence[Any]
    ways: Mapping[str, Op] = field(default_factory=dict)
    """Other ways to the same bytes, of the same operands."""
    library: Mapping[str, Op] = field(default_factory=dict)
    """The vendor's way to the result, whose bytes may differ."""
    op: str = ""
    """The op's name among works; empty where nothing is tuned."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    picked: Any = None
    """The schedule that the op's rule takes."""
    entry: str = ""
    """The name that a pick looks a winner up by."""
    moved: float = 0.0
    """Bytes of operands and results."""
    products: float = 0.0
    """Multiplications of a sum of products."""


def described(setting: Setting, *widths: int) -> bool:
    """Whether descriptors can address rows of these widths there."""
    aligned = not any(n * setting.dtype.itemsize % DESCRIPTOR_BYTES for n in widths)
    return has_tma(setting.device) and aligned


def product(
    setting: Setting, layout: str, m: int, n: int, k: int, out_dtype: torch.dtype | None = None, *,
    bias: bool = False, every: bool = False,
) -> Launch:  # fmt: skip
    """[m, k] times a weight: y = x W^T ("nt", weight [n, k]) or dx = dy W ("nn", weight [k, n]).

    With `every` schedule, or those worth timing.
    """
    dtype, out = setting.dtype, out_dtype or setting.dtype
    weight = (n, k) if layout == "nt" else (k, n)

    def operands() -> tuple[Tensor, ...]:
        found = setting.drawn((m, k), 0), setting.drawn(weight, 1, weight_scale(k))
        return (*found, setting.drawn((n,), 2)) if bias else found

    def run(schedule: Any, a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
        fitting = schedule.within(SHARED_BYTES, dtype.itemsize, out.itemsize)
        return matmul_fwd(a, b, added, layout, out, fitting)

    def library(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
        return library_product(a, b, added, layout, out)

    fp32, tma = dtype == torch.float32, described(setting, n, k)
    table = products.candidates(m, dtype, tma=tma)
    if every:
        whole = products.POINTER_FP32 if fp32 else products.CANDIDATES
        table = [s for s in whole if tma or s.kind == "pointer"]
    return Launch(
        name=f"{k} x {n} {layout}",
        operands=operands,
        run=run,
        schedules=table,
        library={"cublaslt": library} if m >= 2 and not fp32 else {},
        op="matmul",
        shape={"layout": layout, "m": m, "n": n, "k": k},
        picked=products.pick(m, n, k, dtype, layout, tma, out),
        entry=products.product_work(layout, dtype, out, tma and not fp32, m, n, k),
        moved=(m * k + n * k) * dtype.itemsize + m * n * out.itemsize,
        products=m * n * k,
    )


def outer(setting: Setting, tokens: int, n: int, k: int, *, fresh: bool = True) -> Launch:
    """dW [n, k] = dy^T x over `tokens`; not `fresh` continues a gradient."""

    def operands() -> tuple[Tensor, ...]:
        dy, x = setting.drawn((tokens, n), 0), setting.drawn((tokens, k), 1)
        wide = accumulator_dtype(x)
        if fresh:
            return dy, x, torch.zeros(n, k, dtype=wide, device=setting.device)
        return dy, x, setting.wide((n, k), 2).to(wide)

    def run(schedule: Any, dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        outer_triton.launch_outer(gradient, dy, x, fresh, schedule)
        return gradient

    def dispatched(dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        fold_outer(gradient, dy, x)
        return gradient

    def library(dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        return library_outer(dy, x, gradient)

    dtype, tma, processors = setting.dtype, described(setting, n, k), sm_count(setting.device)
    covered = fresh and dtype != torch.float32 and tokens % 16 == 0
    return Launch(
        name=f"{n} x {k}",
        operands=operands,
        run=run,
        schedules=folds.candidates(dtype, tma=tma),
        ways={} if fresh else {"as dispatched": dispatched},
        library={"cublaslt": library} if covered else {},
        op="fold",
        shape={"tokens": tokens, "n": n, "k": k},
        picked=folds.pick(tokens, n, k, dtype, tma=tma, processors=processors),
        entry=folds.fold_work(tokens, n, k, dtype, tma=tma),
        moved=tokens * (n + k) * dtype.itemsize + n * k * 4,
        products=tokens * n * k,
    )


def qkv(
    setting: Setting, m: int, columns: tuple[int, int, int], k: int, *, bias: bool = False
) -> Launch:
    """q, k and v of few rows in one launch."""

    def operands() -> tuple[Tensor, ...]:
        x = setting.drawn((m, k), 40, 0.01)
        weights = [setting.drawn((n, k), 41 + i, weight_scale(k)) for i, n in enumerate(columns)]
        biases = [setting.drawn((n,), i, 0.01) for i, n in enumerate(columns) if bias]
        return x, *weights, *biases

    def run(schedule: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        wq, wk, wv, bq, bk, bv = [*rest, None, None, None][:6]
        return few_rows_triton.qkv_fwd(x, wq, wk, wv, bq, bk, bv, schedule)

    def apart(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(rest[:3], [*rest[3:], None, None, None][:3], strict=True)
        return tuple(matmul_nt(x, w, bias=b, out_dtype=x.dtype) for w, b in pairs)

    dtype, total = setting.dtype, sum(columns)
    return Launch(
        name="q, k, v",
        operands=operands,
        run=run,
        schedules=few_rows.few_rows_candidates(few_rows.QKV, dtype, tma=False),
        ways={"against the ops apart": apart},
        op="qkv",
        shape={"m": m, "n": "+".join(map(str, columns)), "k": k},
        picked=few_rows.pick_qkv(m, dtype, columns, k),
        entry=few_rows.qkv_work(dtype, m, columns, k),
        moved=(total * k + m * (k + total)) * dtype.itemsize,
        products=m * total * k,
    )


def gate_up(setting: Setting, m: int, n: int, k: int, activation: str = "silu") -> Launch:
    """Gate, up and their product for few rows in one launch."""
    dtype = setting.dtype

    def operands() -> tuple[Tensor, ...]:
        x = setting.drawn((m, k), 40, 0.01)
        return x, *(setting.drawn((n, k), 41 + i, weight_scale(k)) for i in range(2))

    def run(schedule: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        # A stage holds two weight tiles.
        fitting = schedule.within(SHARED_BYTES // 2, dtype.itemsize, dtype.itemsize)
        return few_rows_triton.gate_up_glu_fwd(x, gate, up, activation, fitting)

    def apart(x: Tensor, *weights: Tensor) -> Tensor:
        gate, up = (matmul_nt(x, w, bias=None, out_dtype=dtype) for w in weights)
        return glu.glu_fwd(gate, up, activation)

    tma = described(setting, k, n)
    return Launch(
        name=f"gate, up, {activation}",
        operands=operands,
        run=run,
        schedules=few_rows.few_rows_candidates(few_rows.GATE_UP, dtype, tma=tma),
        ways={"against the ops apart": apart},
        op="gate_up",
        shape={"m": m, "n": n, "k": k},
        picked=few_rows.pick_gate_up(m, n, dtype, tma),
        entry=few_rows.gate_up_work(dtype, tma, m, n, k),
        moved=(2 * n * k + m * (k + n)) * dtype.itemsize,
        products=2 * m * n * k,
    )


def gated(setting: Setting, direction: str, rows: int, width: int, activation: str) -> Launch:
    """The gated activation of [rows, width], "forward" or "backward"."""

    def run(schedule: Any, first: Tensor, second: Tensor, third: Tensor | None = None) -> Any:
        if third is None:
            return glu.glu_fwd(first, second, activation, schedule)
        return tuple(glu.glu_bwd(first, second, third, activation, False, schedule))

    dtype, scales = setting.dtype, (0.25, 1 / 64)
    if direction == "backward":
        scales = (1 / 64, *scales)
    return Launch(
        name=f"{activation} {direction}",
        operands=lambda: tuple(setting.drawn((rows, width), i, s) for i, s in enumerate(scales)),
        run=run,
        schedules=_with_picked(glu.SCHEDULE, glu.CANDIDATES),
        op=f"glu {direction}",
        shape={"tokens": rows, "width": width},
        picked=glu.SCHEDULE,
        entry=glu.glu_work(direction, dtype, activation, rows, width),
        moved=(2 * len(scales) - 1) * rows * width * dtype.itemsize,
    )


def rotation(setting: Setting, tokens: int, heads: int, kv_heads: int, dim: int) -> Launch:
    """Rotated queries and keys; the backward pass is the same kernel, the sine negated."""

    def operands() -> tuple[Tensor, ...]:
        q, k = (setting.drawn((tokens, n, dim), i) for i, n in enumerate((heads, kv_heads)))
        return q, k, *(setting.wide((tokens, dim // 2), i, 0.25).clamp(-1, 1) for i in (2, 3))

    dtype = setting.dtype
    return Launch(
        name="q and k",
        operands=operands,
        run=lambda schedule, q, k, c, s: rotary.rotary_fwd(q, k, c, s, False, schedule),
        schedules=_with_picked(rotary.SCHEDULE, rotary.CANDIDATES),
        op="rotary",
        shape={"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
        picked=rotary.SCHEDULE,
        entry=rotary.rotary_work(dtype, tokens, heads, kv_heads, dim),
        moved=2 * tokens * (heads + kv_heads) * dim * dtype.itemsize,
    )


def norm_forward(setting: Setting, rows: int, width: int, *, adds: bool = False) -> Launch:
    """RMSNorm of [rows, width], after the addition of a residual if it `adds` one."""

    def operands() -> tuple[Tensor, ...]:
        weight = setting.drawn((width,), 5, 0.1)
        return *(setting.drawn((rows, width), 1 + i) for i in range(1 + adds)), weight

    def run(schedule: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return rms_norm_fwd(x, rest[0] if adds else None, rest[-1], EPS, schedule)

    picked = rms_norm.pick_forward(width)
    return Launch(
        name=f"width {width}",
        operands=operands,
        run=run,
        schedules=_with_picked(picked, rms_norm.candidates(width)),
        op="add_rms_norm forward" if adds else "rms_norm forward",
        shape={"rows": rows, "width": width},
        picked=picked,
        entry=rms_norm.norm_work("forward", setting.dtype, adds, width, 1, rows),
        moved=(4 if adds else 2) * rows * width * setting.dtype.itemsize,
    )


def norm_backward(
    setting: Setting, rows: int, width: int, heads: int = 1, *, adds: bool = False,
    table: Sequence[Any] = (),
) -> Launch:  # fmt: skip
    """RMSNorm's backward pass, the step sums of dweight and their fold, of [rows, width] or [rows,
    heads, width]; with the residual's gradient if it `adds` one. `table` are its schedules."""
    shape = (rows, width) if heads == 1 else (rows, heads, width)

    def operands() -> tuple[Tensor, ...]:
        dy, x = setting.drawn(shape, 6, 0.01), setting.drawn(shape, 1)
        rstd = (x.float().square().mean(-1) + EPS).rsqrt().flatten()
        dtotal = [setting.drawn(shape, 3)] if adds else []
        return dy, x, setting.drawn((width,), 5, 0.1), rstd, *dtotal

    def run(schedule: Any, dy: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        weight, rstd, *dtotal = rest
        added = dtotal[0] if adds else None
        dx, sums = rms_norm_bwd(dy, added, x, weight, rstd, heads, True, schedule)
        return dx, sums, folded_step_sums(sums, setting.dtype)

    name = f"width {width}" if heads == 1 else f"{heads} heads of {width}"
    picked = rms_norm.pick_backward(width, heads)
    return Launch(
        name=f"{name}, backward",
        operands=operands,
        run=run,
        schedules=table or _with_picked(picked, rms_norm.candidates(width, heads)),
        op="add_rms_norm backward" if adds else "rms_norm backward",
        shape={"rows": rows, "width": width},
        picked=picked,
        entry=rms_norm.norm_work("backward", setting.dtype, adds, width, heads, rows),
        moved=(4 if adds else 3) * rows * width * setting.dtype.itemsize,
    )


def gradient_rows(setting: Setting, index: Tensor, height: int, width: int) -> Launch:
    """A buffer of embedding rows continued over the tokens of `index`, ranked and sorted."""

    def operands() -> tuple[Tensor, ...]:
        rows, start = setting.drawn((len(index), width), 3), setting.wide((height, width), 4)
        return start.to(accumulator_dtype(rows)), index, rows

    def run(choice: tuple[Any, bool], buffer: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        rows_triton.launch_rows(buffer, index, rows, choice[0], ranked=choice[1])
        return buffer

    table = [(s, ranked) for s in rows_triton.CANDIDATES for ranked in (True, False)]
    return Launch(name="rows", operands=operands, run=run, schedules=table)


def head(setting: Setting, kind: str, rows: int, vocabulary: int, width: int) -> Launch:
    """The LM head's product by descriptors, reduced to "statistics" of vocabulary blocks or turned
    into the logit "gradient" of a chunk."""
    device, dtype = setting.device, setting.dtype

    def operands() -> tuple[Tensor, ...]:
        hidden = setting.drawn((rows, width), 0)
        weight = setting.drawn((vocabulary, width), 1, weight_scale(width))
        divisor = torch.ones(rows, device=device)
        if kind == "statistics":
            return hidden, weight, divisor
        partials = token_statistics(hidden, weight, divisor, True, "tma")
        top, normalizer, entropy = vocabulary_combine(partials)
        dlogprobs, dentropy = setting.wide((2, rows), 2).unbind(0)
        targets = torch.arange(rows, device=device) % vocabulary
        table = token_gradient_table(
            divisor, top, normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
        )
        # A descriptor stores whole lines.
        room = torch.zeros(rows, -(-vocabulary // 64) * 64, dtype=dtype, device=device)
        return hidden, weight, table, room

    def statistics(schedule: str, hidden: Tensor, weight: Tensor, divisor: Tensor) -> Tensor:
        return token_statistics(hidden, weight, divisor, True, schedule)

    def gradient(schedule: str, hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor):
        written = room[:, :vocabulary]
        token_gradient(hidden, weight, table, written, True, schedule)
        return written

    written = rows * vocabulary if kind == "gradient" else 0
    return Launch(
        name=f"fused {kind}",
        operands=operands,
        run=gradient if kind == "gradient" else statistics,
        schedules=_with_picked("tma", logprobs.candidates(kind)),
        op=f"token_logprobs {kind}",
        shape={"rows": rows, "n": vocabulary, "k": width},
        picked="tma",
        entry=logprobs.head_work(kind, dtype, vocabulary, width, rows),
        moved=((rows + vocabulary) * width + written) * dtype.itemsize,
        products=rows * vocabulary * width,
    )


def _with_picked(picked: Any, table: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys((picked, *table)))
