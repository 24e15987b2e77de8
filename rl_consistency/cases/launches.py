"""Launches by every entry of their tables of schedules: what `verify` walks and `tune` times.

Every candidate of a launch must give the same bytes, and so must its `ways`. Scales keep results
within fp16 where outliers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from rl_consistency.cases.case import EPS, Op, Setting, as_tuple, weight_scale
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES, has_tma, sm_count
from rl_consistency.kernels.core.findings import schedule_name
from rl_consistency.kernels.gradient_fold import outer_triton
from rl_consistency.kernels.gradient_fold import schedules as folds
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.linear import few_rows_triton
from rl_consistency.kernels.linear import schedules as few_rows
from rl_consistency.kernels.matmul import schedules as products
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES, matmul_fwd
from rl_consistency.kernels.pointwise import glu, rotary
from rl_consistency.kernels.rms_norm import schedules as rms_norm
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd, rms_norm_fwd
from rl_consistency.kernels.sampling.vocabulary_triton import vocabulary_combine
from rl_consistency.kernels.token_logprobs import head_triton
from rl_consistency.kernels.token_logprobs import schedules as logprobs
from rl_consistency.kernels.token_logprobs.lm_head import IGNORED

COPY_BANDWIDTH, MATMUL_RATE = 3e12, 6e14
"""Bytes a second and products a second that bound a launch from below: they order launches, and no
figure is made of them."""

UNABLE = (OutOfResources, PTXASError, CompilationError, RuntimeError)
"""What a candidate raises that does not fit; of RuntimeErrors, only the compiler's."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of an op at one shape."""

    op: str
    shape: Mapping[str, Any]
    """Names of sizes and their values."""
    operands: Callable[[], tuple[Tensor, ...]]
    """Makes the operands, with the same values at each call."""
    candidates: Mapping[str, Op]
    """Name of a schedule -> the launch by that schedule; it may write into its operands."""
    picked: str = ""
    """The candidate that the op's rule takes."""
    ways: Mapping[str, Op] = field(default_factory=dict)
    """Other ways to the same bytes, of the same operands."""
    entry: str = ""
    """The name that a pick looks a winner up by; empty where none does."""
    fewer: Launch | None = None
    """The launch with fewer rows of its bucket, where a winner must not lose to the op's rule."""
    moved: float = 0.0
    """Bytes of operands and results."""
    products: float = 0.0
    """Multiplications of a sum of products."""
    calls: float = 1.0
    """How often a step of training makes it."""

    @property
    def key(self) -> str:
        """The launch's name in results."""
        return " ".join([self.op, *(f"{name}={size}" for name, size in self.shape.items())])

    @property
    def default(self) -> str:
        """The candidate whose bytes are the reference."""
        return self.picked if self.picked in self.candidates else next(iter(self.candidates))

    @property
    def seconds(self) -> float:
        """What all calls may take in a step, roughly; launches are tuned in this order."""
        return self.calls * max(self.moved / COPY_BANDWIDTH, 2 * self.products / MATMUL_RATE)


@dataclass(frozen=True)
class Comparison:
    """What the candidates of a launch gave."""

    reference: tuple[Tensor, ...]
    """The default's results."""
    default: str
    equal: dict[str, Op]
    """Candidates with the reference's bytes."""
    withdrawn: dict[str, str]
    """Candidates with other bytes: why."""
    unable: dict[str, Exception]
    """Candidates that do not fit this device or do not compile for it: why."""


def compare(launch: Launch, operands: tuple[Tensor, ...], only: Iterable[str] = ()) -> Comparison:
    """Run the candidates, or `only` some and the default, and compare bytes with the default's.

    Each call has operands of its own, since it may write into them. Where no rule picks a default,
    the first candidate that fits is the reference; ValueError where none does.
    """
    wanted, unable = {*only}, {}
    found: Comparison | None = None
    for name in dict.fromkeys([launch.default, *launch.candidates]):
        if wanted and name not in (launch.default, *wanted):
            continue
        call = launch.candidates[name]
        try:
            result = as_tuple(call(*(x.clone() for x in operands)))
        except UNABLE as error:
            if (found is None and launch.picked) or not does_not_compile(error):
                raise
            unable[name] = error
            continue
        found = found or Comparison(result, name, {}, {}, unable)
        pairs = zip(result, found.reference, strict=True)
        if count := sum(_differing(a, b) for a, b in pairs):
            of = sum(x.numel() for x in result)
            found.withdrawn[name] = f"{count} of {of} elements differ from {found.default}"
        else:
            found.equal[name] = call
    if found is None:
        raise ValueError(f"{launch.key}: no schedule of {len(launch.candidates)} fits this device.")
    return found


def does_not_compile(error: Exception) -> bool:
    """Whether one of `UNABLE` says that a schedule does not fit the device, or does not compile."""
    return not isinstance(error, RuntimeError) or "PassManager::run failed" in str(error)


def _differing(a: Tensor, b: Tensor) -> int:
    if a.numel() == 0:
        return 0
    a, b = (x.contiguous().view(torch.uint8).view(*x.shape, -1) for x in (a, b))
    return int((a != b).any(-1).sum())


def candidates(run: Callable[..., Any], table: Iterable[Any]) -> dict[str, Op]:
    """`run(schedule, *operands)` by every entry of a table, each by its name."""
    named = ((schedule_name(s) if hasattr(s, "__dict__") else str(s), s) for s in table)
    return {name: partial(run, schedule) for name, schedule in named}


def tuned(
    op: str, run: Callable[..., Any], table: Iterable[Any], picked: Any, **fields: Any
) -> Launch:
    """A launch by every entry of a table, of which the op's rule takes `picked`."""
    name = schedule_name(picked)
    return Launch(op=op, candidates=candidates(run, table), picked=name, **fields)


def described(setting: Setting, *widths: int) -> bool:
    """Whether descriptors can address rows of these widths there."""
    aligned = not any(n * setting.dtype.itemsize % DESCRIPTOR_BYTES for n in widths)
    return has_tma(setting.device) and aligned


def product(
    setting: Setting, layout: str, m: int, n: int, k: int, out_dtype: torch.dtype | None = None, *,
    bias: bool = False, every: bool = False,
) -> Launch:  # fmt: skip
    """[m, k] times a weight: y = x W^T ("nt", weight [n, k]) or dx = dy W ("nn", weight [k, n]).

    By `every` schedule, or by those worth timing.
    """
    dtype, out = setting.dtype, out_dtype or setting.dtype
    weight = (n, k) if layout == "nt" else (k, n)

    def operands() -> tuple[Tensor, ...]:
        found = setting.drawn((m, k), 0), setting.drawn(weight, 1, weight_scale(k))
        return (*found, setting.drawn((n,), 2)) if bias else found

    def run(schedule: Any, a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
        fitting = schedule.within(SHARED_BYTES, dtype.itemsize, out.itemsize)
        return matmul_fwd(a, b, added, layout, out, fitting)

    fp32, tma = dtype == torch.float32, described(setting, n, k)
    table = products.candidates(m, dtype, tma=tma)
    if every:
        whole = products.POINTER_FP32 if fp32 else products.CANDIDATES
        table = [s for s in whole if tma or s.kind == "pointer"]
    return tuned(
        "matmul", run, table, products.pick(m, n, k, dtype, layout, tma, out),
        shape={"layout": layout, "m": m, "n": n, "k": k},
        operands=operands,
        entry=products.product_work(layout, dtype, out, tma and not fp32, m, n, k),
        moved=(m * k + n * k) * dtype.itemsize + m * n * out.itemsize,
        products=m * n * k,
    )  # fmt: skip


def outer(setting: Setting, tokens: int, n: int, k: int, *, fresh: bool = True) -> Launch:
    """dW [n, k] = dy^T x over `tokens`; not `fresh` continues a gradient."""

    def operands() -> tuple[Tensor, ...]:
        dy, x = setting.drawn((tokens, n), 0), setting.drawn((tokens, k), 1)
        before = torch.zeros(n, k, device=setting.device) if fresh else setting.wide((n, k), 2)
        return dy, x, before.to(accumulator_dtype(x))

    def run(schedule: Any, dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        outer_triton.launch_outer(gradient, dy, x, fresh, schedule)
        return gradient

    def dispatched(dy: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        fold_outer(gradient, dy, x)
        return gradient

    dtype, tma, processors = setting.dtype, described(setting, n, k), sm_count(setting.device)
    picked = folds.pick(tokens, n, k, dtype, tma=tma, processors=processors)
    return tuned(
        "fold", run, folds.candidates(dtype, tma=tma), picked,
        shape={"tokens": tokens, "n": n, "k": k},
        operands=operands,
        ways={} if fresh else {"as dispatched": dispatched},
        entry=folds.fold_work(tokens, n, k, dtype, tma=tma),
        moved=tokens * (n + k) * dtype.itemsize + n * k * 4,
        products=tokens * n * k,
    )  # fmt: skip


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
    table = few_rows.few_rows_candidates(few_rows.QKV, dtype, tma=False)
    return tuned(
        "qkv", run, table, few_rows.pick_qkv(m, dtype, columns, k),
        shape={"m": m, "n": "+".join(map(str, columns)), "k": k},
        operands=operands,
        ways={"against the ops apart": apart},
        entry=few_rows.qkv_work(dtype, m, columns, k),
        moved=(total * k + m * (k + total)) * dtype.itemsize,
        products=m * total * k,
    )  # fmt: skip


def gate_up(setting: Setting, m: int, n: int, k: int, activation: str = "silu") -> Launch:
    """Gate, up and their product for few rows in one launch."""
    dtype, tma = setting.dtype, described(setting, k, n)

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

    table = few_rows.few_rows_candidates(few_rows.GATE_UP, dtype, tma=tma)
    return tuned(
        "gate_up", run, table, few_rows.pick_gate_up(m, n, dtype, tma),
        shape={"m": m, "n": n, "k": k},
        operands=operands,
        ways={"against the ops apart": apart},
        entry=few_rows.gate_up_work(dtype, tma, m, n, k),
        moved=(2 * n * k + m * (k + n)) * dtype.itemsize,
        products=2 * m * n * k,
    )  # fmt: skip


def gated(setting: Setting, direction: str, rows: int, width: int, activation: str) -> Launch:
    """The gated activation of [rows, width], "forward" or "backward"."""

    def run(schedule: Any, first: Tensor, second: Tensor, third: Tensor | None = None) -> Any:
        if third is None:
            return glu.glu_fwd(first, second, activation, schedule)
        return tuple(glu.glu_bwd(first, second, third, activation, False, schedule))

    scales = (0.25, 1 / 64) if direction == "forward" else (1 / 64, 0.25, 1 / 64)
    return tuned(
        f"glu {direction}", run, (glu.SCHEDULE, *glu.CANDIDATES), glu.SCHEDULE,
        shape={"tokens": rows, "width": width},
        operands=lambda: tuple(setting.drawn((rows, width), i, s) for i, s in enumerate(scales)),
        entry=glu.glu_work(direction, setting.dtype, activation, rows, width),
        moved=(2 * len(scales) - 1) * rows * width * setting.dtype.itemsize,
    )  # fmt: skip


def rotation(setting: Setting, tokens: int, heads: int, kv_heads: int, dim: int) -> Launch:
    """Rotated queries and keys; the backward pass is the same kernel, the sine negated."""

    def operands() -> tuple[Tensor, ...]:
        q, k = (setting.drawn((tokens, n, dim), i) for i, n in enumerate((heads, kv_heads)))
        return q, k, *(setting.wide((tokens, dim // 2), i, 0.25).clamp(-1, 1) for i in (2, 3))

    return tuned(
        "rotary", lambda schedule, q, k, c, s: rotary.rotary_fwd(q, k, c, s, False, schedule),
        (rotary.SCHEDULE, *rotary.CANDIDATES), rotary.SCHEDULE,
        shape={"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
        operands=operands,
        entry=rotary.rotary_work(setting.dtype, tokens, heads, kv_heads, dim),
        moved=2 * tokens * (heads + kv_heads) * dim * setting.dtype.itemsize,
    )  # fmt: skip


def norm_forward(setting: Setting, rows: int, width: int, *, adds: bool = False) -> Launch:
    """RMSNorm of [rows, width], after the addition of a residual if it `adds` one."""

    def operands() -> tuple[Tensor, ...]:
        weight = setting.drawn((width,), 5, 0.1)
        return *(setting.drawn((rows, width), 1 + i) for i in range(1 + adds)), weight

    def run(schedule: Any, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return rms_norm_fwd(x, rest[0] if adds else None, rest[-1], EPS, schedule)

    picked = rms_norm.pick_forward(width)
    return tuned(
        f"{'add_' * adds}rms_norm forward", run, (picked, *rms_norm.candidates(width)), picked,
        shape={"rows": rows, "width": width},
        operands=operands,
        entry=rms_norm.norm_work("forward", setting.dtype, adds, width, 1, rows),
        moved=(4 if adds else 2) * rows * width * setting.dtype.itemsize,
    )  # fmt: skip


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

    picked = rms_norm.pick_backward(width, heads)
    return tuned(
        f"{'add_' * adds}rms_norm backward", run,
        table or (picked, *rms_norm.candidates(width, heads)), picked,
        shape={"rows": rows, "width": width},
        operands=operands,
        entry=rms_norm.norm_work("backward", setting.dtype, adds, width, heads, rows),
        moved=(4 if adds else 3) * rows * width * setting.dtype.itemsize,
    )  # fmt: skip


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
        partials = head_triton.token_statistics(hidden, weight, divisor, True, "tma")
        top, normalizer, entropy = vocabulary_combine(partials)
        dlogprobs, dentropy = setting.wide((2, rows), 2).unbind(0)
        targets = torch.arange(rows, device=device) % vocabulary
        table = head_triton.token_gradient_table(
            divisor, top, normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
        )
        # A descriptor stores whole lines.
        room = torch.zeros(rows, -(-vocabulary // 64) * 64, dtype=dtype, device=device)
        return hidden, weight, table, room

    def run(schedule: str, hidden: Tensor, weight: Tensor, table: Tensor, *room: Tensor) -> Tensor:
        if kind == "statistics":
            return head_triton.token_statistics(hidden, weight, table, True, schedule)
        written = room[0][:, :vocabulary]
        head_triton.token_gradient(hidden, weight, table, written, True, schedule)
        return written

    written = rows * vocabulary if kind == "gradient" else 0
    return tuned(
        f"token_logprobs {kind}", run, ("tma", *logprobs.candidates(kind)), "tma",
        shape={"rows": rows, "n": vocabulary, "k": width},
        operands=operands,
        entry=logprobs.head_work(kind, dtype, vocabulary, width, rows),
        moved=((rows + vocabulary) * width + written) * dtype.itemsize,
        products=rows * vocabulary * width,
    )  # fmt: skip
