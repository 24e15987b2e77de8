"""`token_logprobs` on CUDA: a plan per call, fused forward, and backward chunk by chunk."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.sampling.statistics_triton import (
    vocabulary_combine,
    vocabulary_row_statistics,
)
from rl_consistency.kernels.token_logprobs.backward_triton import (
    token_gradient,
    token_gradient_table,
    token_row_gradient,
    token_target_gradient,
)
from rl_consistency.kernels.token_logprobs.forward_triton import (
    token_statistics,
    token_target_logits,
)
from rl_consistency.kernels.token_logprobs.lm_head import chunks, lm_head_gradients, lm_head_logits
from rl_consistency.kernels.token_logprobs.plan import KeptLogits, Plan, choose_plan, keeps_logits
from rl_consistency.kernels.token_logprobs.schedules import UNFUSED
from rl_consistency.kernels.token_logprobs.targets import IGNORED


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
        pieces = [
            _scores(hidden[span], weight, targets[span], rows.select(span), plan)
            for span in chunks(hidden.shape[0], plan.forward_chunk, kept.stop)
        ]
        if logits is not None:
            KeptLogits.note(logits)
            pieces.insert(
                0, _scores(hidden[kept], weight, targets[kept], rows.select(kept), plan, logits)
            )
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
        room = _logit_room(weight, min(plan.chunk_tokens, hidden.shape[0]))

        def write(span: slice, logits: Tensor | None = None) -> Tensor:
            dlogits, part = room[: span.stop - span.start], table[:, span]
            _write_gradient(hidden[span], weight, rows.select(span), plan, part, dlogits, logits)
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


def _scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: SamplingRows,
    plan: Plan,
    logits: Tensor | None = None,
) -> Tensor:
    """[4, n] fp32: logprobs of the targets, entropies, log-normalizers, maxima."""
    if rows.truncates:
        one = distribution(lm_head_logits(hidden, weight), rows)
        safe = targets.masked_fill(targets == IGNORED, 0)
        # Backward reads `scaled`, which has the maximum subtracted already.
        top = torch.zeros_like(one.log_normalizer)
        return torch.stack([one.logprobs_of(safe), one.entropy(), one.log_normalizer, top])
    divisor, unit = rows.divisor, rows.unit_temperature
    if logits is None and plan.statistics == UNFUSED:
        logits = lm_head_logits(hidden, weight)
    if logits is not None:
        partials = vocabulary_row_statistics(logits, divisor, unit)
    else:
        partials = token_statistics(hidden, weight, divisor, unit, plan.statistics)
    top, log_normalizer, entropy = vocabulary_combine(partials)
    target = token_target_logits(hidden, weight, targets, divisor, unit)
    return torch.stack([(target - top) - log_normalizer, entropy, log_normalizer, top])


def _write_gradient(
    hidden: Tensor,
    weight: Tensor,
    rows: SamplingRows,
    plan: Plan,
    table: Tensor,
    dlogits: Tensor,
    logits: Tensor | None,
) -> None:
    """Fill dlogits [n, V] with gradients as if no entry were a target, from `logits` if given."""
    if rows.truncates:
        scaled = distribution(lm_head_logits(hidden, weight), rows).scaled
        token_row_gradient(scaled, table, dlogits, True)
    elif logits is not None or plan.gradient == UNFUSED:
        logits = lm_head_logits(hidden, weight) if logits is None else logits
        token_row_gradient(logits, table, dlogits, rows.unit_temperature)
    else:
        token_gradient(hidden, weight, table, dlogits, rows.unit_temperature, plan.gradient)


def _logit_room(weight: Tensor, count: int) -> Tensor:
    """[count, V] in the model dtype. A descriptor stores whole lines, so rows are padded to 64."""
    vocabulary = weight.shape[0]
    return weight.new_empty((count, cdiv(vocabulary, 64) * 64))[:, :vocabulary]
