"""The distribution a token is drawn from: softmax(logits / temperature) within top-k, top-p, min-p.

Shapes: logits [T, V] fp32, `SamplingRows` of T -> `Distribution` of T rows.
Dtypes and rounding points: fp32; one division by the temperature, then one subtraction of the row's
    maximum; exp and log in fp32; the mass of top_p in integers.
Order: sampling_support/v3, `ORDER` below.
Invariant to: the other rows. Varies with: V.
Backward: in `token_logprobs`; the support is a constant there.
Errors: ValueError on parameters out of range and on a vocabulary too large for the integer mass.
Cost: on a CPU one stable sort of [T, V] where any row truncates. On CUDA one read of the logits,
    two or three more where a row truncates.

Training recomputes from bit-equal logits the distribution that rollout samples from, so a token's
logprob is the one it was sampled with, truncated or not. top_p adds up integers because a device
may add a running sum of floats in another order from call to call.
Source: Fan et al., top-k (2018); Holtzman et al., nucleus sampling (2020); Nguyen et al., min-p
    (2024).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.sampling.distribution import (
    Distribution,
    ReducedDistribution,
    WrittenDistribution,
)
from rl_consistency.kernels.sampling.sampling_rows import SamplingRows
from rl_consistency.kernels.sampling.statistics_triton import (
    vocabulary_combine,
    vocabulary_row_statistics,
)
from rl_consistency.kernels.sampling.support_triton import vocabulary_support

MASS_UNIT = 2.0**40
"""A mass is an integer in units of 1 / `MASS_UNIT`; the most probable id has the mass 1."""
MAX_VOCABULARY = 2**22
"""The masses of so many ids add up to less than 2**63."""

_SUPPORT = (
    "z = logits / temperature, in fp32;  x = z - max z\n"
    "rank ids by z downward, equal z by lower id first\n"
    "top_k:    keep the first k\n"
    "mass:     exp(x) * 2**40 rounded to an integer; sums are exact\n"
    "top_p:    keep an id where the kept masses before it add up to less than\n"
    "          ceil(top_p * (all kept masses)), the product in fp64\n"
    "always keep the first rank; temperature 0 keeps nothing else\n"
)

ORDER = ReductionOrder(
    id="sampling_support",
    version=3,
    cpu=_SUPPORT + "min_p:    keep exp(x) >= min_p\n"
    "s = x, -inf outside the support\n"
    "log_normalizer = log(tree(exp(s))) in id order;  u = log_normalizer - s\n"
    "entropy = tree(p * u), p = exp(-u)",
    cuda=_SUPPORT + "min_p:    keep x >= log(min_p), taken in fp64 and rounded to fp32\n"
    "exp(x) = exp2((x - n*ln 2) * log2 e) * 2**n, n = floor(x*log2 e + 1/2), ln 2 in two parts\n"
    "of each block b of 128 ids: m_b = max z;  x = z - m_b;  e = exp2(x * log2 e)\n"
    "  S_b = tree(e);  W_b = tree(e*x), its first level fma(e', x', e*x), ' = 64 ids on\n"
    "over the blocks, padded to a power of two: m = max m_b;  f = exp(m_b - m)\n"
    "  S = tree(S_b * f);  W = tree(fma(S_b, m_b - m, W_b) * f)\n"
    "log_normalizer = log S;  entropy = log S - W / S",
)


def distribution(logits: Tensor, rows: SamplingRows) -> Distribution:
    """The sampling distribution of each row of unscaled logits [T, V] fp32.

    TypeError unless logits are an fp32 matrix, ValueError unless `rows` has T entries.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise TypeError(
            f"sampling: logits are {logits.dtype} {tuple(logits.shape)}; need fp32 [T, V]."
        )
    if rows.temperature.shape[0] != logits.shape[0]:
        raise ValueError(
            f"sampling: {rows.temperature.shape[0]} parameters for {logits.shape[0]} rows."
        )
    if logits.is_cuda:
        return triton_distribution(logits, rows)
    scaled = logits / rows.divisor.unsqueeze(1)
    if rows.truncates:
        scaled = scaled.masked_fill(~sorted_support(scaled, rows), -torch.inf)
    scaled -= scaled.amax(dim=1, keepdim=True)
    log_normalizer = torch.log(tree_sum(torch.exp(scaled)))
    return WrittenDistribution(written=scaled, log_normalizer=log_normalizer)


def triton_distribution(logits: Tensor, rows: SamplingRows) -> ReducedDistribution:
    """`distribution` in the order of CUDA."""
    logits = dense_rows(logits)
    divisor, unit = rows.divisor.contiguous(), rows.unit_temperature
    support = None
    if rows.truncates:
        _check_vocabulary(logits)
        temperature, top_k, top_p, min_p = (
            t.contiguous() for t in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        )
        support = vocabulary_support(logits, temperature, top_k, top_p, min_p, unit)
    top, log_normalizer, entropy = vocabulary_combine(
        vocabulary_row_statistics(logits, divisor, unit, support)
    )
    return ReducedDistribution(
        logits=logits,
        divisor=divisor,
        unit_temperature=unit,
        support=support,
        top=top,
        log_normalizer=log_normalizer,
        row_entropy=entropy,
    )


def _check_vocabulary(logits: Tensor) -> None:
    if logits.shape[1] > MAX_VOCABULARY:
        raise ValueError(
            f"sampling: a vocabulary of {logits.shape[1]} with top_k, top_p, min_p or temperature "
            f"0; allowed: up to {MAX_VOCABULARY} ids. Sample without truncation."
        )


def sorted_support(
    scaled: Tensor, rows: SamplingRows, exp: Callable[[Tensor], Tensor] = torch.exp
) -> Tensor:
    """[T, V] bool: the support of logits / temperature, by a sort; masses and min_p use `exp`."""
    _check_vocabulary(scaled)
    ranked, order = torch.sort(scaled, dim=1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    top_k = rows.top_k.masked_fill(rows.top_k == 0, scaled.shape[1])
    top_k = top_k.masked_fill(rows.temperature == 0, 1).unsqueeze(1)
    kept = rank < top_k
    relative = exp(ranked - ranked[:, :1])
    mass = (relative.double() * MASS_UNIT).round_().nan_to_num_(0.0).long().masked_fill_(~kept, 0)
    running = mass.cumsum(dim=1)
    threshold = (rows.top_p.double() * running[:, -1].double()).ceil().long()
    limited = (rows.top_p < 1).unsqueeze(1)
    kept &= ~limited | (running - mass < threshold.unsqueeze(1))
    kept &= relative >= rows.min_p.unsqueeze(1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)
