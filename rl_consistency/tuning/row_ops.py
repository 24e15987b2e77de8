"""The works of ops that treat rows one by one, and of the LM head's fused products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.core.findings import schedule_name
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums
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
from rl_consistency.tuning.products import drawn, least_seconds
from rl_consistency.tuning.work import Work

FP32 = torch.float32


def glu_work(
    device: torch.device, direction: str, rows: int, width: int, dtype: torch.dtype,
    activation: str, calls: float = 1.0,
) -> Work:  # fmt: skip
    """The gated activation of [rows, width], "forward" or "backward"."""

    def forward(schedule: glu.GluSchedule, gate: Tensor, up: Tensor) -> Tensor:
        return glu.glu_fwd(gate, up, activation, schedule)

    def backward(schedule: glu.GluSchedule, dy: Tensor, gate: Tensor, up: Tensor) -> Any:
        return tuple(glu.glu_bwd(dy, gate, up, activation, False, schedule))

    call, count = (forward, 2) if direction == "forward" else (backward, 3)
    return _work(
        f"glu {direction}",
        {"tokens": rows, "width": width},
        partial(drawn, device, dtype, *[(rows, width)] * count),
        glu.SCHEDULE,
        glu.CANDIDATES,
        call,
        glu.glu_work(direction, dtype, activation, rows, width),
        (2 * count - 1) * rows * width * dtype.itemsize,
        calls,
    )


def rotary_work(
    device: torch.device, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """Rotation of queries and keys; the backward pass is the same kernel, the sine negated."""

    def operands() -> tuple[Tensor, ...]:
        q, k = drawn(device, dtype, (tokens, heads, dim), (tokens, kv_heads, dim))
        return q, k, *drawn(device, FP32, (tokens, dim // 2), (tokens, dim // 2))

    def call(schedule: rotary.RotarySchedule, *given: Tensor) -> Any:
        return rotary.rotary_fwd(*given, inverse=False, schedule=schedule)

    return _work(
        "rotary",
        {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
        operands,
        rotary.SCHEDULE,
        rotary.CANDIDATES,
        call,
        rotary.rotary_work(dtype, tokens, heads, kv_heads, dim),
        2 * tokens * (heads + kv_heads) * dim * dtype.itemsize,
        calls,
    )


def norm_forward(
    device: torch.device, rows: int, width: int, dtype: torch.dtype, *, adds: bool = False,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """RMSNorm of [rows, width], after the addition of a residual if it `adds` one."""

    def call(schedule: rms_norm.NormSchedule, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return rms_norm_fwd(x, residual if adds else None, weight[0], 1e-6, schedule)

    shape = rows, width
    return _work(
        "add_rms_norm forward" if adds else "rms_norm forward",
        {"rows": rows, "width": width},
        partial(drawn, device, dtype, shape, shape if adds else (1, 1), (1, width)),
        rms_norm.pick_forward(width),
        rms_norm.candidates(width),
        call,
        rms_norm.norm_work("forward", dtype, adds, width, 1, rows),
        (4 if adds else 2) * rows * width * dtype.itemsize,
        calls,
    )


def norm_backward(
    device: torch.device, rows: int, width: int, dtype: torch.dtype, *, adds: bool = False,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """RMSNorm's backward pass and the sums of the weight's gradient; with the residual's gradient
    if it `adds` one. Norms of heads have a kernel of one schedule."""

    def operands() -> tuple[Tensor, ...]:
        shape = rows, width
        found = drawn(device, dtype, shape, shape, shape if adds else (1, 1), (1, width))
        return *found, drawn(device, FP32, (rows, 1))[0].abs()

    def call(
        schedule: rms_norm.NormSchedule, dy: Tensor, x: Tensor, dtotal: Tensor, weight: Tensor,
        rstd: Tensor,
    ) -> Any:  # fmt: skip
        added = dtotal if adds else None
        dx, sums = rms_norm_bwd(dy, added, x, weight[0], rstd[:, 0], 1, True, schedule)
        return dx, folded_step_sums(sums, dtype)

    return _work(
        "add_rms_norm backward" if adds else "rms_norm backward",
        {"rows": rows, "width": width},
        operands,
        rms_norm.pick_backward(width, 1),
        rms_norm.candidates(width, 1),
        call,
        rms_norm.norm_work("backward", dtype, adds, width, 1, rows),
        (4 if adds else 3) * rows * width * dtype.itemsize,
        calls,
    )


def head_statistics(
    device: torch.device, rows: int, vocabulary: int, width: int, dtype: torch.dtype,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """The LM head's product, reduced to statistics of vocabulary blocks; descriptors only."""

    def operands() -> tuple[Tensor, ...]:
        hidden, weight = drawn(device, dtype, (rows, width), (vocabulary, width))
        return hidden, weight, torch.ones(rows, device=device)

    def call(schedule: str, hidden: Tensor, weight: Tensor, divisor: Tensor) -> Tensor:
        return token_statistics(hidden, weight, divisor, True, schedule)

    return _head("statistics", rows, vocabulary, width, dtype, operands, call, 0.0, calls)


def head_gradient(
    device: torch.device, rows: int, vocabulary: int, width: int, dtype: torch.dtype,
    calls: float = 1.0,
) -> Work:  # fmt: skip
    """The LM head's product, turned into logit gradients of a chunk; descriptors only."""

    def operands() -> tuple[Tensor, ...]:
        hidden, weight = drawn(device, dtype, (rows, width), (vocabulary, width))
        divisor = torch.ones(rows, device=device)
        partials = token_statistics(hidden, weight, divisor, True, "tma")
        dlogprobs, dentropy = drawn(device, FP32, (2, rows))[0].unbind(0)
        targets = torch.arange(rows, device=device) % vocabulary
        top, normalizer, entropy = vocabulary_combine(partials)
        table = token_gradient_table(
            divisor, top, normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
        )
        # A descriptor stores whole lines.
        room = torch.zeros(rows, -(-vocabulary // 64) * 64, dtype=dtype, device=device)
        return hidden, weight, table, room

    def call(schedule: str, hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor) -> Tensor:
        written = room[:, :vocabulary]
        token_gradient(hidden, weight, table, written, True, schedule)
        return written

    written = rows * vocabulary * dtype.itemsize
    return _head("gradient", rows, vocabulary, width, dtype, operands, call, written, calls)


def _head(
    product: str, rows: int, vocabulary: int, width: int, dtype: torch.dtype,
    operands: Callable[[], tuple[Tensor, ...]], call: Callable[..., Any], written: float,
    calls: float,
) -> Work:  # fmt: skip
    return _work(
        f"token_logprobs {product}",
        {"rows": rows, "n": vocabulary, "k": width},
        operands,
        "tma",
        logprobs.candidates(product),
        call,
        logprobs.head_work(product, dtype, vocabulary, width, rows),
        (rows + vocabulary) * width * dtype.itemsize + written,
        calls,
        rows * vocabulary * width,
    )


def _work(
    op: str, shape: dict[str, Any], operands: Callable[[], tuple[Tensor, ...]], picked: Any,
    schedules: Sequence[Any], call: Callable[..., Any], entry: str, moved: float, calls: float,
    products: float = 0.0,
) -> Work:  # fmt: skip
    return Work(
        op=op,
        shape=shape,
        operands=operands,
        candidates={schedule_name(s): partial(call, s) for s in (picked, *schedules)},
        picked=schedule_name(picked),
        entry=entry,
        moved_bytes=moved,
        seconds=calls * least_seconds(moved, products),
    )
