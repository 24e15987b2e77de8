"""The check of `token_logprobs`'s targets, and the target of rows that are not scored."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100
"""Target of a row that is not scored; its logprob and entropy are 0."""


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
