"""The distribution a token is drawn from: logits / temperature, restricted by top-k, top-p and
min-p.

Shapes: logits [T, V] fp32, one set of parameters per row -> scaled logits [T, V] fp32,
    log-normalizer [T] fp32.
Dtypes and rounding points: fp32; one division by the temperature, then one subtraction of the row's
    maximum; exp and log in fp32.
Order: `ORDER` below.
Invariant to: the other rows.
Varies with: V.
Backward: in `token_logprobs`; the support is a constant there.
Errors: ValueError on parameters outside their ranges.
Cost: one stable sort of [T, V] where any row truncates, else memory-bound.

Rollout samples from this and training recomputes it from bit-equal logits, so the logprob of a
token
under truncation is the true behaviour logprob on both sides.
Source: Fan et al., top-k (2018); Holtzman et al., nucleus sampling (2020); Nguyen et al., min-p
    (2024).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_consistency.kernels.reduction_order import ReductionOrder
from rl_consistency.kernels.row_reduction import tree_sum

ORDER = ReductionOrder(
    id="sampling_support",
    version=1,
    text=(
        "z = logits/temperature. Tokens ranked by z downward, equal z by lower id first. top_k "
        "keeps the first k; top_p then keeps a token while the fp64 running sum of the kept "
        "probabilities before it, in rank order, is below top_p; min_p then keeps exp(z - max z) "
        ">= min_p; the first rank always stays. Temperature 0 keeps the first rank alone. s = z - "
        "max z; log_normalizer = log(tree(exp(s))) over the support in id order, others counting "
        "as 0."
    ),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingRows:
    """Sampling parameters, one entry per row of logits."""

    temperature: Tensor
    """[T] fp32, >= 0; 0 is greedy."""
    top_k: Tensor
    """[T] int64, >= 0; 0 keeps all."""
    top_p: Tensor
    """[T] fp32 in (0, 1]; 1 keeps all."""
    min_p: Tensor
    """[T] fp32 in [0, 1]; 0 keeps all."""

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
        """The same parameters for `count` rows.

        Raises:
            ValueError: a parameter outside its range.
        """
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
            raise ValueError(
                f"sampling: temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p "
                f"{min_p}; allowed: temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1."
            )
        return cls(
            temperature=torch.full((count,), temperature, dtype=torch.float32, device=device),
            top_k=torch.full((count,), top_k, dtype=torch.int64, device=device),
            top_p=torch.full((count,), top_p, dtype=torch.float32, device=device),
            min_p=torch.full((count,), min_p, dtype=torch.float32, device=device),
        )

    @classmethod
    def concatenate(cls, parts: list[SamplingRows]) -> SamplingRows:
        """Rows of several, one after another."""
        return cls(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)})

    def select(self, index: Tensor | slice) -> SamplingRows:
        """The rows chosen by an index, mask or slice."""
        return SamplingRows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def truncates(self) -> bool:
        """Whether any row restricts its support."""
        return bool(
            ((self.temperature == 0) | (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any()
        )


@dataclass(frozen=True, eq=False)
class Distribution:
    """What a row's token is drawn from.

    Example: logits [[1, 3, 2]] at temperature 1 and top_k 2 give scaled [[-inf, 0, -1]],
    log_normalizer [0.3133] and probabilities [[0, 0.7311, 0.2689]].
    """

    scaled: Tensor
    """[T, V] fp32, logits / temperature less the row's largest, -inf outside the support."""
    log_normalizer: Tensor
    """[T] fp32, log of the sum of exp(scaled). The maximum is not added back: a large one would
    round away the low bits of every probability."""

    def logprobs_of(self, token_ids: Tensor) -> Tensor:
        """[T] fp32 log-probability of one token per row; -inf outside the support."""
        picked = self.scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        return picked - self.log_normalizer

    def probabilities(self) -> Tensor:
        """[T, V] fp32."""
        return torch.exp(self.scaled - self.log_normalizer.unsqueeze(1))

    def surprise(self, probabilities: Tensor) -> Tensor:
        """[T, V] fp32 negative log-probabilities; 0 where the probability is 0."""
        surprise = self.log_normalizer.unsqueeze(1) - self.scaled
        return surprise.masked_fill(probabilities == 0, 0.0)

    def entropy(self) -> Tensor:
        """[T] fp32 entropy in nats."""
        probabilities = self.probabilities()
        return tree_sum(probabilities * self.surprise(probabilities))


def distribution(logits: Tensor, rows: SamplingRows) -> Distribution:
    """The sampling distribution of each row.

    Args:
        logits: [T, V] fp32, unscaled.
        rows: T sampling parameters.

    Returns:
        scaled logits and their log-normalizer.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise TypeError(
            f"sampling: logits are {logits.dtype} {tuple(logits.shape)}; need fp32 [T, V]."
        )
    if rows.temperature.shape[0] != logits.shape[0]:
        raise ValueError(
            f"sampling: {rows.temperature.shape[0]} parameters for {logits.shape[0]} rows."
        )
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0)
    scaled = logits / temperature.unsqueeze(1)
    if rows.truncates:
        scaled = scaled.masked_fill(~_support(scaled, rows), -torch.inf)
    scaled -= scaled.amax(dim=1, keepdim=True)
    return Distribution(scaled, torch.log(tree_sum(torch.exp(scaled))))


def _support(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """[T, V] bool: tokens that may be drawn."""
    ranked, order = torch.sort(scaled, dim=1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    top_k = rows.top_k.masked_fill(rows.top_k == 0, scaled.shape[1])
    top_k = top_k.masked_fill(rows.temperature == 0, 1).unsqueeze(1)
    kept = rank < top_k
    relative = torch.exp(ranked - ranked[:, :1])
    mass = relative.double().masked_fill(~kept, 0.0)
    running = mass.cumsum(dim=1)
    before, total = running - mass, running[:, -1:]
    limited = (rows.top_p < 1).unsqueeze(1)
    kept &= ~limited | (before < rows.top_p.double().unsqueeze(1) * total)
    kept &= relative >= rows.min_p.unsqueeze(1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)
