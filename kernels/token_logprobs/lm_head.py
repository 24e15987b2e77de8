"""The LM head's three products: logits, and the gradients of hidden states and weight.

Rows come in chunks, so that the logits or logit gradients of all rows never exist at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_consistency.kernels.core.operand import require_operands
from rl_consistency.kernels.gradient_fold.op import GradientBuffer, fold_outer, fold_parameter
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt


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


def chunks(num_rows: int, chunk_tokens: int, start: int = 0) -> list[slice]:
    """The rows from `start` on, in chunks."""
    starts = range(start, num_rows, chunk_tokens)
    return [slice(i, min(i + chunk_tokens, num_rows)) for i in starts]


def lm_head_gradients(
    hidden: Tensor,
    weight: Tensor,
    spans: Sequence[slice],
    logit_gradient: Callable[[slice], Tensor],
    needs: Sequence[bool],
    weight_grad: GradientBuffer | None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dhidden, dweight), each if `needs` says so, chunk by chunk of all rows.

    `logit_gradient` gives a chunk's logit gradients [n, V] in the dtype of weight. If there is a
    `weight_grad`, dweight is folded into it and autograd receives none.
    """
    # All memory is allocated before the weight's gradient is written to.
    dhidden = torch.empty_like(hidden) if needs[0] else None

    def fold(buffer: Tensor | None, fresh: bool) -> None:
        if buffer is not None and fresh and not spans:
            buffer.zero_()
        for span in spans:
            dlogits = logit_gradient(span)
            if dhidden is not None:
                dhidden[span] = matmul_nn(dlogits, weight, out_dtype=hidden.dtype)
            if buffer is not None:
                fold_outer(buffer, dlogits, hidden[span], fresh=fresh and span.start == 0)

    if needs[1]:
        return dhidden, fold_parameter(weight, weight_grad, fold, overwrites=True)
    fold(None, False)
    return dhidden, None
