"""log p(target | hidden state) and the entropy of p, straight from hidden states and the LM head.

Shapes: hidden [T, H], weight [V, H], targets [T] int64, `SamplingRows` of T -> logprobs [T] fp32,
    entropy [T] fp32.
Dtypes and rounding points: hidden and weight fp32, bf16, fp16; logits stay fp32 (never rounded to
    the model dtype, as stock does); logit gradients are rounded to the model dtype once, then
    hidden gradients once.
Order: `ORDER` below.
Invariant to: the other rows, the chunk of tokens, which other positions are scored; on CUDA also
    whether the vocabulary is reduced within the product or read back from memory.
Varies with: H, V.
Backward: to hidden in the matmul order over V; to weight by `gradient_fold` over the rows in order.
    The support is a constant.
Errors: TypeError on dtypes, ValueError on shapes, targets, devices and autocast.
Cost: logits of a chunk of tokens at a time, recomputed in backward: memory chunk_tokens x V, never
    T x V. On CUDA no logits are written unless a row truncates (or the operands are fp32): forward
    is one product, backward three, and one chunk of logit gradients in the model dtype. Of wide
    models the first chunk's logits wait for backward (`token_logprobs_kept`), where they save its
    product.

Rollout reads its logits through `lm_head_logits` and its logprobs through the same `Distribution`,
so the two sides are one function.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold.op import STEP, GradientBuffer, fold_outer, fold_parameter
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.sampling.op import Distribution, SamplingRows, distribution
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
from rl_consistency.kernels.token_logprobs.kept import Waiting, keeps_logits
from rl_consistency.kernels.token_logprobs.plan import Plan, choose_plan
from rl_consistency.kernels.token_logprobs.schedules import UNFUSED

IGNORED = -100
"""Target of a position that is not scored; its logprob and entropy are 0."""

CPU_CHUNK = 1024

ORDER = ReductionOrder(
    id="token_logprobs",
    version=2,
    cpu=(
        "Logits in the matmul order over H, fp32; the distribution by the sampling-support order "
        "over V; logprob = s[target] - log_normalizer; entropy = tree(p*u) with u = "
        "log_normalizer - s. Backward: dz = dlogprob*(onehot - p) + dentropy*(p*(u - entropy)), "
        "dlogits = dz/temperature rounded to the model dtype; dhidden in the matmul order over V; "
        "dweight by the gradient fold over rows. On CUDA: dlogits = p*(a + b*u) with u = (s - m) - "
        "log_normalizer, p = exp2(u*log2 e), for fp32 models exp(u); a = -(dlogprob + "
        "dentropy*entropy)/temperature, the product fused, b = -dentropy/temperature; the target's "
        "entry fma(p, a + b*u, dlogprob/temperature). s = logits/temperature correctly rounded."
    ),
)


def lm_head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of rows of hidden states.

    Args:
        hidden: [T, H].
        weight: [V, H].

    Returns:
        [T, V] fp32, unrounded.
    """
    _check_head(hidden, weight)
    return matmul_nt(hidden, weight)


def _check_head(hidden: Tensor, weight: Tensor) -> None:
    require_operands("token_logprobs", hidden=hidden, weight=weight)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"token_logprobs: hidden {tuple(hidden.shape)} does not fit the LM head "
            f"{tuple(weight.shape)}; they are [tokens, hidden_size] and [vocab, hidden_size]."
        )


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: SamplingRows,
    *,
    chunk_tokens: int | None = None,
    weight_grad: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row's sampling distribution.

    Args:
        hidden: [T, H] hidden states after the final norm.
        weight: [V, H] of the LM head.
        targets: [T] int64; `IGNORED` (-100) where nothing is scored.
        rows: sampling parameters of the T rows.
        chunk_tokens: rows whose logits or logit gradients exist at one time; neutral to the bits, a
            multiple of 16. None chooses by the device.
        weight_grad: buffer that the LM head's gradient is folded into.

    Returns:
        (logprobs [T] fp32, entropy [T] fp32), both 0 where the target is ignored, both
        differentiable.
    """
    _check_head(hidden, weight)
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"token_logprobs: targets {tuple(targets.shape)} {targets.dtype} for hidden "
            f"{tuple(hidden.shape)}; one int64 target per row."
        )
    if rows.temperature.shape != targets.shape:
        raise ValueError(
            f"token_logprobs: {rows.temperature.shape[0]} sampling parameters for "
            f"{hidden.shape[0]} rows; one of each per row."
        )
    if chunk_tokens is not None and (chunk_tokens < STEP or chunk_tokens % STEP):
        raise ValueError(
            f"token_logprobs: chunk_tokens {chunk_tokens}; a multiple of {STEP} is needed."
        )
    _check_targets(targets, weight.shape[0])
    if hidden.is_cuda:
        return triton_token_logprobs(hidden, weight, targets, rows, chunk_tokens, weight_grad)
    chunk_tokens = CPU_CHUNK if chunk_tokens is None else chunk_tokens
    return apply(_TokenLogprobs, hidden, weight, targets, rows, chunk_tokens, weight_grad)


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    """One copy to the host. During graph capture there is none: a target that is no token then has
    the logprob NaN."""
    if targets.numel() == 0 or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    scored = targets.masked_fill(targets == IGNORED, 0)
    low, high = torch.stack(scored.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"token_logprobs: targets span [{low}, {high}], the LM head has {vocabulary} rows. Use "
            "the tokenizer that belongs to the model."
        )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, chunk_tokens, weight_grad):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.rows, ctx.chunk_tokens, ctx.weight_grad = rows, chunk_tokens, weight_grad
        logprobs = torch.zeros(hidden.shape[0], device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        for span in _chunks(hidden.shape[0], chunk_tokens):
            chosen, sampled, target = _chunk(hidden, weight, targets, rows, span)
            logprobs[span] = sampled.logprobs_of(target).masked_fill(~chosen, 0.0)
            entropy[span] = sampled.entropy().masked_fill(~chosen, 0.0)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        hidden, weight, targets = ctx.saved_tensors
        dlogprobs, dentropy = grad_outputs
        dhidden = torch.zeros_like(hidden)
        spans = list(_chunks(hidden.shape[0], ctx.chunk_tokens))

        def fold(buffer: Tensor | None, fresh: bool) -> None:
            if buffer is not None and fresh and not spans:
                buffer.zero_()
            for span in spans:
                dlogits = _logit_gradient(
                    *_chunk(hidden, weight, targets, ctx.rows, span),
                    dlogprobs[span],
                    dentropy[span],
                    ctx.rows.temperature[span],
                ).to(weight.dtype)
                dhidden[span] = matmul_nn(dlogits, weight, out_dtype=hidden.dtype)
                if buffer is not None:
                    fold_outer(buffer, dlogits, hidden[span], fresh=fresh and span.start == 0)

        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = fold_parameter(weight, ctx.weight_grad, fold, overwrites=True)
        else:
            fold(None, False)
        return dhidden, dweight, None, None, None, None


def _chunks(num_rows: int, chunk_tokens: int, start: int = 0) -> list[slice]:
    starts = range(start, num_rows, chunk_tokens)
    return [slice(i, min(i + chunk_tokens, num_rows)) for i in starts]


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows, span: slice
) -> tuple[Tensor, Distribution, Tensor]:
    """(scored [n] bool, distribution of the n rows, targets [n] with ignored ones set to 0)."""
    sampled = distribution(lm_head_logits(hidden[span], weight), rows.select(span))
    chosen = targets[span] != IGNORED
    return chosen, sampled, targets[span].masked_fill(~chosen, 0)


def _logit_gradient(
    chosen: Tensor,
    sampled: Distribution,
    target: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor,
    temperature: Tensor,
) -> Tensor:
    """[n, V] fp32 gradient of the unscaled logits; zero for rows that are ignored or greedy."""
    active = chosen & (temperature > 0)
    dlogprobs, dentropy = (g.masked_fill(~active, 0.0).unsqueeze(1) for g in (dlogprobs, dentropy))
    p = sampled.probabilities()
    dscaled = -(dlogprobs * p)
    dscaled.scatter_add_(1, target.unsqueeze(1), dlogprobs)
    surprise = sampled.surprise(p)
    dscaled = dscaled + dentropy * (p * (surprise - tree_sum(p * surprise).unsqueeze(1)))
    return dscaled / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)


def triton_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: SamplingRows,
    chunk_tokens: int | None = None,
    weight_grad: GradientBuffer | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` in the order of CUDA; operands are not checked again."""
    hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (hidden, weight))
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
        spans = _chunks(hidden.shape[0], plan.forward_chunk, kept.stop)
        pieces = [
            _scores(hidden[span], weight, targets[span], rows.select(span), plan) for span in spans
        ]
        if logits is not None:
            Waiting.hold(logits)
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
        table = token_gradient_table(
            rows.temperature.contiguous(),
            top,
            log_normalizer,
            entropy,
            dlogprobs,
            dentropy,
            targets,
            IGNORED,
        )
        spans = _chunks(hidden.shape[0], plan.chunk_tokens)
        # All that a chunk needs is allocated before the gradient is written to.
        dlogits = _logit_room(weight, min(plan.chunk_tokens, hidden.shape[0]))
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None

        def write(span: slice, logits: Tensor | None = None) -> Tensor:
            chunk, part = dlogits[: span.stop - span.start], table[:, span]
            _write_gradient(hidden[span], weight, rows.select(span), plan, part, chunk, logits)
            token_target_gradient(part, logprobs[span], targets[span], chunk)
            return chunk

        # Kept logits are used up and freed before the gradient is allocated. A second backward pass
        # over the same graph computes them again.
        first = None if ctx.logits is None else write(spans[0], ctx.logits)
        ctx.logits = None

        def fold(buffer: Tensor | None, fresh: bool) -> None:
            if buffer is not None and fresh and not spans:
                buffer.zero_()
            for span in spans:
                chunk = first if first is not None and span.start == 0 else write(span)
                if dhidden is not None:
                    dhidden[span] = matmul_nn(chunk, weight, out_dtype=hidden.dtype)
                if buffer is not None:
                    fold_outer(buffer, chunk, hidden[span], fresh=fresh and span.start == 0)

        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = fold_parameter(weight, ctx.weight_grad, fold, overwrites=True)
        else:
            fold(None, False)
        return dhidden, dweight, None, None, None, None


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
        # The backward pass reads scaled logits, whose maximum has been taken off.
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
    logits: Tensor | None = None,
) -> None:
    """Fill dlogits [n, V] with the gradients of entries that are no targets; `logits` spares the
    product."""
    if rows.truncates:
        scaled = distribution(lm_head_logits(hidden, weight), rows).scaled
        token_row_gradient(scaled, table, dlogits, True)
    elif logits is not None or plan.gradient == UNFUSED:
        logits = lm_head_logits(hidden, weight) if logits is None else logits
        token_row_gradient(logits, table, dlogits, rows.unit_temperature)
    else:
        token_gradient(hidden, weight, table, dlogits, rows.unit_temperature, plan.gradient)


def _logit_room(weight: Tensor, count: int) -> Tensor:
    """[count, V] in the model dtype, rows spaced so that tiles can be copied by descriptor, whose
    stores fill the last 16 bytes of a row; nothing reads what is past column V."""
    vocabulary = weight.shape[0]
    return weight.new_empty((count, -(-vocabulary // 64) * 64))[:, :vocabulary]


def token_logprobs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Untruncated (logprobs, entropy) in fp64, for accuracy tests only."""
    logprobs = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
