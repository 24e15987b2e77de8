"""log p(target | hidden state) and the entropy of p, straight from hidden states and the LM head.

Shapes: hidden [T, H], weight [V, H], targets [T] int64, `SamplingRows` of T -> logprobs [T] fp32,
    entropy [T] fp32.
Dtypes and rounding points: hidden and weight fp32, bf16, fp16; logits stay fp32 (never rounded to
    the model dtype, as stock does); logit gradients are rounded to the model dtype once, then
    hidden gradients once.
Order: `ORDER` below.
Invariant to: the other rows, the chunk of tokens, which other positions are scored.
Varies with: H, V.
Backward: to hidden in the matmul order over V; to weight by `gradient_fold` over the rows in order.
    The support is a constant.
Errors: TypeError on dtypes, ValueError on shapes, targets, devices and autocast.
Cost: logits of a chunk of tokens at a time, recomputed in backward: memory chunk_tokens x V, never
    T x V.

Rollout reads its logits through `lm_head_logits` and its logprobs through the same `Distribution`,
so the two sides are one function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_consistency.kernels.gradient_fold import STEP, GradientBuffer, fold_outer, fold_parameter
from rl_consistency.kernels.matmul import row_matmul
from rl_consistency.kernels.operand import require_operands
from rl_consistency.kernels.reduction_order import ReductionOrder
from rl_consistency.kernels.row_reduction import tree_sum
from rl_consistency.kernels.sampling_support import Distribution, SamplingRows, distribution

IGNORED = -100
"""Target of a position that is not scored; its logprob and entropy are 0."""

ORDER = ReductionOrder(
    id="token_logprobs",
    version=1,
    text=(
        "Logits in the matmul order over H, fp32; the distribution by the sampling-support order "
        "over V; logprob = s[target] - log_normalizer; entropy = tree(p*u) with u = "
        "log_normalizer - s. Backward: dz = dlogprob*(onehot - p) + dentropy*(p*(u - entropy)), "
        "dlogits = dz/temperature rounded to the model dtype; dhidden in the matmul order over V; "
        "dweight by the gradient fold over rows."
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
    return row_matmul(hidden, weight.t())


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
    chunk_tokens: int = 1024,
    weight_grad: GradientBuffer | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row's sampling distribution.

    Args:
        hidden: [T, H] hidden states after the final norm.
        weight: [V, H] of the LM head.
        targets: [T] int64; `IGNORED` (-100) where nothing is scored.
        rows: sampling parameters of the T rows.
        chunk_tokens: rows whose logits exist at one time; neutral to the bits, a multiple of 16.
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
    if chunk_tokens < STEP or chunk_tokens % STEP:
        raise ValueError(
            f"token_logprobs: chunk_tokens {chunk_tokens}; a multiple of {STEP} is needed."
        )
    scored = targets[targets != IGNORED]
    if scored.numel() and not (int(scored.min()) >= 0 and int(scored.max()) < weight.shape[0]):
        raise ValueError(
            f"token_logprobs: targets span [{int(scored.min())}, {int(scored.max())}], the LM head "
            f"has {weight.shape[0]} rows. Use the tokenizer that belongs to the model."
        )
    return _TokenLogprobs.apply(hidden, weight, targets, rows, chunk_tokens, weight_grad)  # type: ignore[no-any-return]


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
            for span in spans:
                dlogits = _logit_gradient(
                    *_chunk(hidden, weight, targets, ctx.rows, span),
                    dlogprobs[span],
                    dentropy[span],
                    ctx.rows.temperature[span],
                ).to(weight.dtype)
                dhidden[span] = row_matmul(dlogits, weight).to(hidden.dtype)
                if buffer is not None:
                    fold_outer(buffer, dlogits, hidden[span], fresh=fresh and span.start == 0)

        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = fold_parameter(weight, ctx.weight_grad, fold)
        else:
            fold(None, False)
        return dhidden, dweight, None, None, None, None


def _chunks(num_rows: int, chunk_tokens: int) -> list[slice]:
    return [slice(i, min(i + chunk_tokens, num_rows)) for i in range(0, num_rows, chunk_tokens)]


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


def token_logprobs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Untruncated (logprobs, entropy) in fp64, for accuracy tests only."""
    logprobs = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
