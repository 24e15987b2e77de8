"""`token_logprobs` on a CPU, chunk by chunk: a distribution forward, logit gradients backward."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.sampling.op import Distribution, SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.lm_head import chunks, lm_head_gradients, lm_head_logits
from rl_consistency.kernels.token_logprobs.targets import IGNORED

CHUNK_TOKENS = 1024


def cpu_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: SamplingRows,
    chunk_tokens: int | None = None,
    weight_grad: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` in the order of a CPU; operands are not checked."""
    chunk_tokens = chunk_tokens or CHUNK_TOKENS
    return apply(_TokenLogprobs, hidden, weight, targets, rows, chunk_tokens, weight_grad)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, chunk_tokens, weight_grad):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.rows, ctx.chunk_tokens, ctx.weight_grad = rows, chunk_tokens, weight_grad
        logprobs = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        for span in chunks(hidden.shape[0], chunk_tokens):
            scored, sampled, target = _chunk(hidden, weight, targets, rows, span)
            logprobs[span] = sampled.logprobs_of(target).masked_fill(~scored, 0.0)
            entropy[span] = sampled.entropy().masked_fill(~scored, 0.0)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        hidden, weight, targets = ctx.saved_tensors
        dlogprobs, dentropy = grad_outputs

        def logit_gradient(span: slice) -> Tensor:
            chunk = _chunk(hidden, weight, targets, ctx.rows, span)
            temperature = ctx.rows.temperature[span]
            dlogits = _logit_gradient(*chunk, dlogprobs[span], dentropy[span], temperature)
            return dlogits.to(weight.dtype)

        spans = chunks(hidden.shape[0], ctx.chunk_tokens)
        gradients = lm_head_gradients(ctx, hidden, weight, spans, logit_gradient, ctx.weight_grad)
        return *gradients, None, None, None, None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows, span: slice
) -> tuple[Tensor, Distribution, Tensor]:
    """(scored [n] bool, distribution of the n rows, targets [n] with ignored ones set to 0)."""
    sampled = distribution(lm_head_logits(hidden[span], weight), rows.select(span))
    scored = targets[span] != IGNORED
    return scored, sampled, targets[span].masked_fill(~scored, 0)


def _logit_gradient(
    scored: Tensor,
    sampled: Distribution,
    target: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor,
    temperature: Tensor,
) -> Tensor:
    """[n, V] fp32 gradient of the unscaled logits; zero for rows that are ignored or greedy."""
    active = scored & (temperature > 0)
    dlogprobs, dentropy = (g.masked_fill(~active, 0.0).unsqueeze(1) for g in (dlogprobs, dentropy))
    p = sampled.probabilities()
    dscaled = -(dlogprobs * p)
    dscaled.scatter_add_(1, target.unsqueeze(1), dlogprobs)
    surprise = sampled.surprise(p)
    dscaled = dscaled + dentropy * (p * (surprise - tree_sum(p * surprise).unsqueeze(1)))
    return dscaled / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)
