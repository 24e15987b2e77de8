"""The LM head's three products: logits, and the gradients of hidden states and weight; and the
checks of their operands.

Rows come in chunks, so that the logits or logit gradients of all rows never exist at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt

IGNORED = -100
"""Target of a row that is not scored; its logprob and entropy are 0."""


def lm_head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [T, V] fp32, unrounded, of hidden [T, H] and weight [V, H]."""
    require_head(hidden, weight)
    return matmul_nt(hidden, weight)


def require_head(hidden: Tensor, weight: Tensor) -> None:
    """Check the LM head's operands: TypeError on dtypes, ValueError on shapes, device, autocast."""
    require_operands("token_logprobs", hidden=hidden, weight=weight)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"token_logprobs: hidden {tuple(hidden.shape)} does not fit the LM head "
            f"{tuple(weight.shape)}; they are [tokens, hidden_size] and [vocab, hidden_size]."
        )


def require_targets(
    targets: Tensor, hidden: Tensor, vocabulary: int, *, values: bool = True
) -> None:
    """ValueError unless targets are one int64 token id, or `IGNORED`, per row of hidden states.

    On CUDA the check of their values copies two numbers to the host. Without it, and in graph
    capture, which allows no copy, an id outside the vocabulary gets the logprob NaN.
    """
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"token_logprobs: targets {tuple(targets.shape)} {targets.dtype} for hidden "
            f"{tuple(hidden.shape)}; one int64 target per row."
        )
    capturing = targets.is_cuda and torch.cuda.is_current_stream_capturing()
    if not values or targets.numel() == 0 or capturing:
        return
    scored = targets.masked_fill(targets == IGNORED, 0)
    low, high = torch.stack(scored.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"token_logprobs: targets span [{low}, {high}], the LM head has {vocabulary} rows. Use "
            "the tokenizer that belongs to the model."
        )


def chunks(num_rows: int, chunk_tokens: int, start: int = 0) -> list[slice]:
    """The rows from `start` on, in chunks."""
    starts = range(start, num_rows, chunk_tokens)
    return [slice(i, min(i + chunk_tokens, num_rows)) for i in starts]


def lm_head_gradients(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    spans: Sequence[slice],
    logit_gradient: Callable[[slice], Tensor],
    weight_grad: GradientBuffer | None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dhidden, dweight) for autograd, each if `ctx` needs it, chunk by chunk of all rows.

    `logit_gradient` gives a chunk's logit gradients [n, V] in the dtype of weight.
    """
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    # All memory is allocated before the weight's gradient is written to.
    dhidden = torch.empty_like(hidden) if needs_hidden else None

    folded = False

    def fold(buffer: Tensor | None, fresh: bool) -> None:
        nonlocal folded
        folded = True
        if buffer is not None and fresh and not spans:
            buffer.zero_()
        for span in spans:
            dlogits = logit_gradient(span)
            if dhidden is not None:
                dhidden[span] = matmul_nn(dlogits, weight, out_dtype=hidden.dtype)
            if buffer is not None:
                fold_outer(buffer, dlogits, hidden[span], fresh=fresh and span.start == 0)

    dweight = None
    if needs_weight:
        dweight = fold_parameter(ctx, weight, weight_grad, fold, overwrites=True)
    if not folded:
        fold(None, False)
    return dhidden, dweight
