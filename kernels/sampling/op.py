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
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from rl_consistency.kernels.core.device import dense_rows
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.kernels.sampling.support_triton import vocabulary_support
from rl_consistency.kernels.sampling.vocabulary_triton import (
    vocabulary_combine,
    vocabulary_draw,
    vocabulary_logprobs,
    vocabulary_row_statistics,
    vocabulary_shifted,
)

_WEIGHT_UNIT = 2.0**52
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


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingRows:
    """Sampling parameters, one entry per row of logits."""

    temperature: Tensor  # [T] fp32, >= 0; 0 is greedy
    top_k: Tensor  # [T] int64, >= 0; 0 keeps all
    top_p: Tensor  # [T] fp32 in (0, 1]; 1 keeps all
    min_p: Tensor  # [T] fp32 in [0, 1]; 0 keeps all

    @classmethod
    def uniform(
        cls,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """`count` rows with the same parameters; ValueError on one outside its range."""
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
            raise ValueError(
                f"sampling: temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p "
                f"{min_p}; allowed: temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1."
            )

        def filled(size: int, where: torch.device | str) -> SamplingRows:
            return cls(
                temperature=torch.full((size,), temperature, dtype=torch.float32, device=where),
                top_k=torch.full((size,), top_k, dtype=torch.int64, device=where),
                top_p=torch.full((size,), top_p, dtype=torch.float32, device=where),
                min_p=torch.full((size,), min_p, dtype=torch.float32, device=where),
            )

        one = filled(1, "cpu")
        return filled(count, device).knowing(
            truncates=one.truncates, unit_temperature=one.unit_temperature
        )

    @classmethod
    def concatenate(cls, parts: list[SamplingRows]) -> SamplingRows:
        """The rows of several parts, one after another."""
        rows = cls(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)})
        if all(len(part._known) == 2 for part in parts):
            return rows.knowing(
                truncates=any(part.truncates for part in parts),
                unit_temperature=all(part.unit_temperature for part in parts),
            )
        return rows

    def select(self, index: Tensor | slice) -> SamplingRows:
        """The rows chosen by an index, mask or slice."""
        return self._each(lambda x: x[index]).knowing(**self._known)

    def to(self, device: torch.device | str) -> SamplingRows:
        """These rows on a device. The copy knows `truncates` and `unit_temperature`."""
        return self._each(lambda x: x.to(device)).knowing(
            truncates=self.truncates, unit_temperature=self.unit_temperature
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> SamplingRows:
        return SamplingRows(**{f.name: change(getattr(self, f.name)) for f in fields(self)})

    @property
    def divisor(self) -> Tensor:
        """[T] fp32 temperatures, 1 where greedy."""
        return self.temperature.masked_fill(self.temperature == 0, 1.0)

    @cached_property
    def truncates(self) -> bool:
        """Whether any row restricts its support; selected rows keep the answer of their source.

        It chooses a schedule and changes no bit.
        """
        return bool(
            ((self.temperature == 0) | (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any()
        )

    @cached_property
    def unit_temperature(self) -> bool:
        """Whether every temperature is known to be 1; changes no bit."""
        return bool((self.temperature == 1).all())

    @property
    def _known(self) -> dict[str, bool]:
        """The answers for `truncates` and `unit_temperature` that have been read."""
        names = ("truncates", "unit_temperature")
        return {name: self.__dict__[name] for name in names if name in self.__dict__}

    def knowing(self, **answers: bool) -> SamplingRows:
        """These rows with known answers for `truncates` and `unit_temperature`."""
        self.__dict__.update(answers)
        return self


class Distribution:
    """What a row's token is drawn from.

    Example: logits [[1, 3, 2]] at temperature 1 and top_k 2 give scaled [[-inf, 0, -1]],
    log_normalizer [0.3133] and probabilities [[0, 0.7311, 0.2689]].
    """

    log_normalizer: Tensor
    """[T] fp32, log of the sum of exp(scaled), without the row's maximum, which would round away
    low bits of every probability."""
    scaled: Tensor
    """[T, V] fp32, logits / temperature less the row's largest, -inf outside the support."""

    def logprobs_of(self, token_ids: Tensor) -> Tensor:
        """[T] fp32 log-probability of one token per row; -inf outside the support."""
        picked = self.scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        return picked - self.log_normalizer

    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """`draw` and the logprobs [T] fp32 of what it drew; NaN in a NaN row."""
        token_ids = self.draw(uniforms)
        return token_ids, self.logprobs_of(token_ids)

    def draw(self, uniforms: Tensor) -> Tensor:
        """[T] int64: the first id whose cumulative weight exceeds u times the total, u [T] fp64 in
        [0, 1). An id weighs floor(p * 2**52), on CUDA with the exp of `ORDER`'s masses; a greedy
        row gives the lowest id among the maxima, a NaN row 0. ValueError on other uniforms.
        """
        if uniforms.dtype != torch.float64 or uniforms.shape != self.log_normalizer.shape:
            raise ValueError(
                f"sampling: uniforms are {uniforms.dtype} {tuple(uniforms.shape)} for "
                f"{self.log_normalizer.shape[0]} rows; need fp64, one per row."
            )
        return self._drawn(uniforms)

    def _drawn(self, uniforms: Tensor) -> Tensor:
        return inverse_cdf(self.probabilities(), uniforms)

    def entropy(self) -> Tensor:
        """[T] fp32 entropy in nats."""
        probabilities = self.probabilities()
        return tree_sum(probabilities * self.surprise(probabilities))

    def probabilities(self) -> Tensor:
        """[T, V] fp32."""
        return torch.exp(self.scaled - self.log_normalizer.unsqueeze(1))

    def surprise(self, probabilities: Tensor) -> Tensor:
        """[T, V] fp32 negative log-probabilities; 0 where the probability is 0."""
        surprise = self.log_normalizer.unsqueeze(1) - self.scaled
        return surprise.masked_fill(probabilities == 0, 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class WrittenDistribution(Distribution):
    """A distribution on a CPU: its scaled logits lie in memory."""

    log_normalizer: Tensor
    scaled: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ReducedDistribution(Distribution):
    """A distribution on CUDA. Methods read the given logits again, so those must not change."""

    log_normalizer: Tensor
    logits: Tensor  # [T, V] fp32 with unit column stride, unscaled
    divisor: Tensor  # [T] fp32 temperatures, 1 where greedy
    unit_temperature: bool  # whether every divisor is known to be 1
    support: Tensor | None  # [2, T] int32 for `vocabulary_triton`; None: every id is in it
    top: Tensor  # [T] fp32, the row's largest logit / temperature
    row_entropy: Tensor  # [T] fp32

    @cached_property
    def scaled(self) -> Tensor:
        return vocabulary_shifted(
            self.logits, self.divisor, self.top, self.unit_temperature, self.support
        )

    def logprobs_of(self, token_ids: Tensor) -> Tensor:
        return vocabulary_logprobs(*self._rows, token_ids, self.unit_temperature)

    def entropy(self) -> Tensor:
        return self.row_entropy

    def _drawn(self, uniforms: Tensor) -> Tensor:
        return vocabulary_draw(*self._rows, uniforms, self.unit_temperature)

    @property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return self.logits, self.divisor, self.support, self.top, self.log_normalizer


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's cumulative probability first exceeds u times its total.

    probabilities [n, V] fp32, not necessarily adding up to exactly 1; uniforms [n] fp64 in [0, 1).
    Returns [n] int64, always a token of positive probability (0 for a row of zeros or NaN).
    """
    weights = (probabilities.nan_to_num(0.0).double() * _WEIGHT_UNIT).long()
    cumulative = weights.cumsum(dim=-1)  # of integers, which are exact in any order
    total = cumulative[:, -1:]
    # u * total may round up to the total: the last token with any weight is the guard.
    threshold = torch.minimum((uniforms[:, None] * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


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
    return WrittenDistribution(scaled=scaled, log_normalizer=log_normalizer)


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
