"""log p(target | hidden state) and the entropy of p, straight from hidden states and the LM head.

Shapes: hidden [T, H], weight [V, H], targets [T] int64, `SamplingRows` of T -> logprobs [T] fp32,
    entropy [T] fp32.
Dtypes and rounding points: hidden and weight fp32, bf16, fp16. Logits stay fp32, where stock rounds
    them to the model dtype. Logit gradients, then hidden gradients, are rounded to it once.
Order: token_logprobs/v2, `ORDER` below.
Invariant to: the other rows, the chunk of tokens, which other positions are scored; on CUDA also
    whether the vocabulary is reduced within the product or read back from memory.
Varies with: H, V.
Backward: to hidden in the matmul order over V; to weight by `gradient_fold` over the rows in order.
    The support is a constant.
Errors: TypeError on dtypes, ValueError on shapes, targets, devices and autocast.
Cost: memory chunk_tokens x V, never T x V: backward computes a chunk's logits again. On CUDA
    forward is one product, backward three, without written logits unless a row truncates or
    operands are fp32. Wide models keep the first chunk's logits for backward (`cuda.keeps_logits`).

Rollout uses the same `lm_head_logits` and `Distribution`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.core.autograd import apply, once_differentiable
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.kernels.sampling.op import Distribution, SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.cuda import triton_token_logprobs
from rl_consistency.kernels.token_logprobs.lm_head import (
    IGNORED,
    chunks,
    lm_head_gradients,
    lm_head_logits,
    require_head,
    require_targets,
)

__all__ = [
    "IGNORED",
    "ORDER",
    "lm_head_logits",
    "token_logprobs",
    "token_logprobs_reference",
    "triton_token_logprobs",
]

_FORWARD = (
    "logits: matmul over H, fp32;  s, log_normalizer, entropy: sampling_support over V\n"
    "logprob = s[target] - log_normalizer\n"
)
_PRODUCTS = "dhidden: matmul over V;  dweight: gradient_fold over rows"

ORDER = ReductionOrder(
    id="token_logprobs",
    version=2,
    cpu=_FORWARD + "u = log_normalizer - s;  p = exp(-u)\n"
    "dz = dlogprob * (onehot - p) + dentropy * (p * (u - entropy))\n"
    "dlogits = dz / temperature, rounded to the model dtype\n" + _PRODUCTS,
    cuda=_FORWARD
    + "z = logits / temperature, correctly rounded;  u = (z - max z) - log_normalizer\n"
    "p = exp2(u * log2 e), in fp32 models exp(u)\n"
    "a = -fma(dentropy, entropy, dlogprob) / temperature;  b = -dentropy / temperature\n"
    "dlogits = p * fma(b, u, a);  at the target fma(p, fma(b, u, a), dlogprob / temperature)\n"
    "dlogits rounded to the model dtype\n" + _PRODUCTS,
)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: SamplingRows,
    *,
    chunk_tokens: int | None = None,
    weight_grad: GradientBuffer | None = None,
    check_targets: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row's sampling distribution.

    Args:
        hidden: [T, H] hidden states after the final norm.
        weight: [V, H] of the LM head.
        targets: [T] int64; `IGNORED` (-100) where nothing is scored.
        rows: sampling parameters of the T rows.
        chunk_tokens: rows whose logits or logit gradients exist at one time, a multiple of 16; it
            changes no bit. None chooses by the device.
        weight_grad: buffer that the LM head's gradient is folded into.
        check_targets: whether to check their values, which waits for a GPU; False if the caller
            knows that they are valid.

    Returns differentiable (logprobs [T] fp32, entropy [T] fp32), both 0 where a target is ignored.
    """
    require_head(hidden, weight)
    if rows.temperature.shape != hidden.shape[:1]:
        raise ValueError(
            f"token_logprobs: {rows.temperature.shape[0]} sampling parameters for "
            f"{hidden.shape[0]} rows; one of each per row."
        )
    if chunk_tokens is not None and (chunk_tokens < STEP or chunk_tokens % STEP):
        raise ValueError(
            f"token_logprobs: chunk_tokens {chunk_tokens}; a multiple of {STEP} is needed."
        )
    require_targets(targets, hidden, weight.shape[0], values=check_targets)
    if hidden.is_cuda:
        return triton_token_logprobs(hidden, weight, targets, rows, chunk_tokens, weight_grad)
    chunk_tokens = chunk_tokens or CHUNK_TOKENS
    return apply(_TokenLogprobs, hidden, weight, targets, rows, chunk_tokens, weight_grad)


def token_logprobs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Untruncated (logprobs, entropy) in fp64, for accuracy tests only."""
    logprobs = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


CHUNK_TOKENS = 1024
"""Rows whose logits exist at one time on a CPU, unless the caller says so."""


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

        def logit_gradient(span: slice) -> Tensor:
            """[n, V] of the unscaled logits; zero for rows that are ignored or greedy."""
            scored, sampled, target = _chunk(hidden, weight, targets, ctx.rows, span)
            temperature = ctx.rows.temperature[span]
            idle = ~(scored & (temperature > 0))
            dlogprobs, dentropy = (
                g[span].masked_fill(idle, 0.0).unsqueeze(1) for g in grad_outputs
            )
            p = sampled.probabilities()
            dscaled = -(dlogprobs * p)
            dscaled.scatter_add_(1, target.unsqueeze(1), dlogprobs)
            surprise = sampled.surprise(p)
            dscaled = dscaled + dentropy * (p * (surprise - tree_sum(p * surprise).unsqueeze(1)))
            dlogits = dscaled / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)
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
