"""`token_logprobs` on CUDA: a plan per call, fused forward, and backward chunk by chunk.

A plan says how one call runs: its chunks, its schedules, and whether backward reuses the first
chunk's logits. No plan changes a bit; a test compares several.

State: `_kept` refers to the kept logits of at most one call in the process. They take the memory
that the LM head's fp32 gradient takes later; keeping more would raise the peak.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.device import dense_rows
from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.sampling.vocabulary_triton import (
    vocabulary_combine,
    vocabulary_row_statistics,
)
from rl_consistency.kernels.token_logprobs.head_triton import (
    token_gradient,
    token_gradient_table,
    token_row_gradient,
    token_statistics,
    token_target_gradient,
    token_target_logits,
)
from rl_consistency.kernels.token_logprobs.lm_head import (
    IGNORED,
    chunks,
    lm_head_gradients,
    lm_head_logits,
)
from rl_consistency.kernels.token_logprobs.schedules import UNFUSED, pick

TRUNCATED_SHARE = 4
"""The factor by which chunks shrink if a row truncates: backward then writes 8 bytes of logits and
2 of gradient per vocabulary entry, not just the 2."""
STATISTICS_CHUNK = 8192
"""Rows of one fused forward product; its block statistics take V/10 bytes a row."""
KEPT_WIDTH = 3072
"""The hidden size from which writing and reading a logit is faster than computing it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one call runs on CUDA; neutral to the bits."""

    chunk_tokens: int  # rows whose logits or logit gradients exist at one time
    statistics: str  # name in `STATISTICS_SCHEDULES`, or `UNFUSED`
    gradient: str  # name in `GRADIENT_SCHEDULES`, or `UNFUSED`
    keeps_logits: bool = False  # whether the first chunk's logits wait for backward


def choose_plan(
    hidden: Tensor, weight: Tensor, rows: SamplingRows, chunk_tokens: int | None = None
) -> Plan:
    """The plan for one call: fused unless a row truncates or operands are fp32. What a chunk writes
    is about half the size of the LM head's fp32 gradient."""
    # Both answers are read here: rows selected later keep them without another copy.
    truncates, _ = rows.truncates, rows.unit_temperature
    wanted = weight.shape[1] // TRUNCATED_SHARE if truncates else weight.shape[1]
    chunk_tokens = chunk_tokens or max(128, wanted // 128 * 128)
    if truncates:
        return Plan(chunk_tokens=chunk_tokens, statistics=UNFUSED, gradient=UNFUSED)
    count = hidden.shape[0]
    return Plan(
        chunk_tokens=chunk_tokens,
        statistics=pick(hidden, weight, "statistics", min(count, STATISTICS_CHUNK)),
        gradient=pick(hidden, weight, "gradient", min(count, chunk_tokens)),
    )


_kept: list[weakref.ref[Tensor]] = []
"""The logits that a graph keeps for a backward pass, or the last that one has kept."""


def keeps_logits(
    weight: Tensor, rows: SamplingRows, plan: Plan, weight_grad: GradientBuffer | None
) -> bool:
    """Whether keeping a chunk's logits saves time without a higher peak of memory: a gradient at
    least as large must be allocated after they are freed."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and max(KEPT_WIDTH, plan.chunk_tokens) <= weight.shape[1]
        and (weight_grad is None or weight_grad.parameter.grad is None)
        and not rows.truncates
        and not any(logits() is not None for logits in _kept)
    )


def triton_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: SamplingRows,
    chunk_tokens: int | None = None,
    weight_grad: GradientBuffer | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` in the order of CUDA; operands are not checked."""
    hidden, weight = dense_rows(hidden), dense_rows(weight)
    if plan is None:
        plan = choose_plan(hidden, weight, rows, chunk_tokens)
        plan = replace(plan, keeps_logits=keeps_logits(weight, rows, plan, weight_grad))
    return apply(_TritonTokenLogprobs, hidden, weight, targets, rows, plan, weight_grad)


class _TritonTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, plan, weight_grad):
        targets = targets.contiguous()
        kept = slice(0, min(plan.chunk_tokens, hidden.shape[0]) if plan.keeps_logits else 0)
        logits = lm_head_logits(hidden[kept], weight) if kept.stop else None

        def scores_of(span: slice, logits: Tensor | None = None) -> Tensor:
            """[4, n] fp32: logprobs of the targets, entropies, log-normalizers, maxima."""
            x, own, target = hidden[span], rows.select(span), targets[span]
            if own.truncates:
                one = distribution(lm_head_logits(x, weight), own)
                # Backward reads `scaled`, which has the maximum subtracted already.
                top = torch.zeros_like(one.log_normalizer)
                safe = target.masked_fill(target == IGNORED, 0)
                return torch.stack([one.logprobs_of(safe), one.entropy(), one.log_normalizer, top])
            divisor, unit = own.divisor, own.unit_temperature
            if logits is None and plan.statistics == UNFUSED:
                logits = lm_head_logits(x, weight)
            if logits is not None:
                partials = vocabulary_row_statistics(logits, divisor, unit)
            else:
                partials = token_statistics(x, weight, divisor, unit, plan.statistics)
            top, log_normalizer, entropy = vocabulary_combine(partials)
            found = token_target_logits(x, weight, target, divisor, unit)
            return torch.stack([(found - top) - log_normalizer, entropy, log_normalizer, top])

        at_once = plan.chunk_tokens if plan.statistics == UNFUSED else STATISTICS_CHUNK
        pieces = [scores_of(span) for span in chunks(hidden.shape[0], at_once, kept.stop)]
        if logits is not None:
            _kept[:] = [weakref.ref(logits)]
            pieces.insert(0, scores_of(kept, logits))
        nothing = hidden.new_empty((4, 0), dtype=torch.float32)
        scores = torch.cat(pieces, dim=1) if pieces else nothing
        logprobs, entropy = scores[:2].masked_fill(targets == IGNORED, 0.0).unbind(0)
        ctx.save_for_backward(hidden, weight, targets, scores)
        ctx.rows, ctx.plan, ctx.weight_grad, ctx.logits = rows, plan, weight_grad, logits
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        hidden, weight, targets, scores = ctx.saved_tensors
        rows, plan = ctx.rows, ctx.plan
        logprobs, entropy, log_normalizer, top = scores.unbind(0)
        dlogprobs, dentropy = (g.contiguous() for g in grad_outputs)
        found = (top, log_normalizer, entropy, dlogprobs, dentropy, targets, IGNORED)
        table = token_gradient_table(rows.temperature.contiguous(), *found)
        spans = chunks(hidden.shape[0], plan.chunk_tokens)
        vocabulary, most = weight.shape[0], min(plan.chunk_tokens, hidden.shape[0])
        # A descriptor stores whole lines, so rows are padded to 64.
        room = weight.new_empty((most, cdiv(vocabulary, 64) * 64))[:, :vocabulary]

        def write(span: slice, logits: Tensor | None = None) -> Tensor:
            """Logit gradients [n, V] of a chunk, from its `logits` if given."""
            dlogits, part = room[: span.stop - span.start], table[:, span]
            own, unit = rows.select(span), rows.unit_temperature
            fused = logits is None and plan.gradient != UNFUSED
            if fused and not own.truncates:
                token_gradient(hidden[span], weight, part, dlogits, unit, plan.gradient)
            else:
                logits = lm_head_logits(hidden[span], weight) if logits is None else logits
                if own.truncates:
                    logits, unit = distribution(logits, own).scaled, True
                token_row_gradient(logits, part, dlogits, unit)
            token_target_gradient(part, logprobs[span], targets[span], dlogits)
            return dlogits

        # Kept logits are freed before the gradient is allocated. A second backward pass computes
        # them again.
        first = None if ctx.logits is None else write(spans[0], ctx.logits)
        ctx.logits = None

        def logit_gradient(span: slice) -> Tensor:
            return first if first is not None and span.start == 0 else write(span)

        gradients = lm_head_gradients(ctx, hidden, weight, spans, logit_gradient, ctx.weight_grad)
        return *gradients, None, None, None, None
