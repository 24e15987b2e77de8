"""Launches and the tables of their schedules: the walks of `verify` and the works of `tune`.

Every schedule of a launch must give the same bytes, and so must its other ways. Scales keep results
within fp16 where outliers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.case import EPS, Op, Setting, weight_scale
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES, has_tma
from rl_consistency.kernels.glu import activation_triton as glu
from rl_consistency.kernels.gradient_fold import outer_triton, rows_triton
from rl_consistency.kernels.gradient_fold import schedules as folds
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.linear import few_rows_triton
from rl_consistency.kernels.linear import schedules as few_rows
from rl_consistency.kernels.matmul import schedules as products
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, matmul_fwd
from rl_consistency.kernels.rms_norm import schedules as rms_norm
from rl_consistency.kernels.rms_norm.backward_triton import rms_norm_bwd
from rl_consistency.kernels.rms_norm.forward_triton import rms_norm_fwd
from rl_consistency.kernels.rotary import rotation_triton as rotary


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


def described(setting: Setting, *widths: int) -> bool:
    """Whether descriptors can address rows of these widths there."""
    aligned = not any(n * setting.dtype.itemsize % DESCRIPTOR_BYTES for n in widths)
    return has_tma(setting.device) and aligned


def product(
    setting: Setting, layout: str, m: int, n: int, k: int, out_dtype: torch.dtype | None = None, *,
    bias: bool = False,
) -> Launch:  # fmt: skip
    """[m, k] times a weight: y = x W^T ("nt", weight [n, k]) or dx = dy W ("nn", weight [k, n])."""
    dtype, out = setting.dtype, out_dtype or setting.dtype
    weight = (n, k) if layout == "nt" else (k, n)

    def operands() -> tuple[Tensor, ...]:
        found = setting.drawn((m, k), 0), setting.drawn(weight, 1, weight_scale(k))
        return (*found, setting.drawn((n,), 2)) if bias else found

    def run(schedule: Any, a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
        fitting = schedule.within(SHARED_BYTES, dtype.itemsize, out.itemsize)
        return matmul_fwd(a, b, added, layout, out, fitting)

    tma = described(setting, weight[1], k, n)
    table = products.POINTER_FP32 if dtype == torch.float32 else products.CANDIDATES
    usable = [s for s in table if tma or s.kind == "pointer"]
    return Launch(name=f"{k} x {n} {layout}", operands=operands, run=run, schedules=usable)


def outer(setting: Setting, tokens: int, n: int, k: int, *, fresh: bool) -> Launch:
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

    usable = folds.candidates(setting.dtype, tma=described(setting, n, k))
    ways = {} if fresh else {"as dispatched": dispatched}
    return Launch(name=f"{n} x {k}", operands=operands, run=run, schedules=usable, ways=ways)


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

    return Launch(
        name="q, k, v",
        operands=operands,
        run=run,
        schedules=few_rows.few_rows_candidates(few_rows.QKV, setting.dtype, tma=False),
        ways={"against the ops apart": apart},
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
    )


def gated(setting: Setting, direction: str, rows: int, width: int, activation: str) -> Launch:
    """The gated activation of [rows, width], "forward" or "backward"."""
    kernel, scales = glu.glu_fwd, (0.25, 1 / 64)
    if direction == "backward":
        kernel, scales = glu.glu_bwd, (1 / 64, 0.25, 1 / 64)
    return Launch(
        name=f"{activation} {direction}",
        operands=lambda: tuple(setting.drawn((rows, width), i, s) for i, s in enumerate(scales)),
        run=lambda schedule, *given: kernel(*given, activation, schedule),
        schedules=glu.CANDIDATES,
    )


def rotation(setting: Setting, tokens: int, heads: int, kv_heads: int, dim: int) -> Launch:
    """Rotated queries and keys."""

    def operands() -> tuple[Tensor, ...]:
        q, k = (setting.drawn((tokens, n, dim), i) for i, n in enumerate((heads, kv_heads)))
        return q, k, *(setting.wide((tokens, dim // 2), i, 0.25).clamp(-1, 1) for i in (2, 3))

    return Launch(
        name="q and k",
        operands=operands,
        run=lambda schedule, *given: rotary.rotary_fwd(*given, False, schedule),
        schedules=rotary.CANDIDATES,
    )


def norm_forward(setting: Setting, rows: int, width: int, *, adds: bool) -> Launch:
    """RMSNorm of [rows, width], after the addition of a residual if it `adds` one."""

    def operands() -> tuple[Tensor, ...]:
        weight = setting.drawn((width,), 5, 0.1)
        return *(setting.drawn((rows, width), 1 + i) for i in range(1 + adds)), weight

    def run(schedule: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        residual = rest[0] if adds else None
        return rms_norm_fwd(x, residual, rest[-1], EPS, schedule)

    table = rms_norm.candidates(width)
    return Launch(name=f"width {width}", operands=operands, run=run, schedules=table)


def norm_backward(
    setting: Setting, rows: int, width: int, heads: int = 1, *, adds: bool = False,
    table: Sequence[Any] = (),
) -> Launch:  # fmt: skip
    """RMSNorm's backward pass and the step sums of dweight, of [rows, width] or [rows, heads,
    width]; with the residual's gradient if it `adds` one."""
    shape = (rows, width) if heads == 1 else (rows, heads, width)

    def operands() -> tuple[Tensor, ...]:
        dy, x = setting.drawn(shape, 6, 0.01), setting.drawn(shape, 1)
        rstd = (x.float().square().mean(-1) + EPS).rsqrt().flatten()
        dtotal = [setting.drawn(shape, 3)] if adds else []
        return dy, x, setting.drawn((width,), 5, 0.1), rstd, *dtotal

    def run(schedule: Any, dy: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        weight, rstd, *dtotal = rest
        added = dtotal[0] if adds else None
        return rms_norm_bwd(dy, added, x, weight, rstd, heads, True, schedule)

    name = f"width {width}" if heads == 1 else f"{heads} heads of {width}"
    table = table or rms_norm.candidates(width, heads)
    return Launch(name=f"{name}, backward", operands=operands, run=run, schedules=table)


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
