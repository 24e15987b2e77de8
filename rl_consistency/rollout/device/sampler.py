"""Turns logits into a token and its logprob, row by row, by the distribution of training.

Sampling is the inverse of the cumulative distribution in token-id order. The probabilities are
turned into integers (multiples of 2**-52) before they are added: an integer sum is exact in any
order. On CUDA they are added up by block of 128 ids and never written out; the exp that makes them
is `exp_fp32` there and torch's on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_consistency.kernels.sampling.op import ReducedDistribution, SamplingRows, distribution

_UNIT = 2.0**52


@torch.no_grad()
def sample(logits: Tensor, rows: SamplingRows, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits [n, V] fp32, uniforms [n] fp64 in [0, 1). Returns token ids [n] int64 and their logprobs
    [n] fp32. A greedy row takes the lowest id among the maxima. A row whose logits are NaN gets a
    NaN logprob and token 0. On CUDA nothing waits where `rows` know whether they truncate.
    """
    behaviour = distribution(logits, rows)
    if isinstance(behaviour, ReducedDistribution):
        token_ids = behaviour.draw(uniforms)
    else:
        token_ids = inverse_cdf(behaviour.probabilities(), uniforms)
    return token_ids, behaviour.logprobs_of(token_ids)


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's cumulative probability first exceeds u times its total.

    probabilities [n, V] fp32, not necessarily adding up to exactly 1; uniforms [n] fp64 in [0, 1).
    Returns [n] int64, always a token of positive probability (0 for a row of zeros or NaN).
    """
    weights = (probabilities.nan_to_num(0.0).double() * _UNIT).long()
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # u * total may round up to the total: the last token with any weight is the guard.
    threshold = torch.minimum((uniforms[:, None] * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
