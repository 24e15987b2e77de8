"""The distribution of one token per row: what rollout draws from and what training scores with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.sampling.draw_triton import vocabulary_draw, vocabulary_logprobs
from rl_consistency.kernels.sampling.statistics_triton import vocabulary_shifted


@dataclass(frozen=True, eq=False, kw_only=True)
class Distribution(ABC):
    """What a row's token is drawn from.

    Example: logits [[1, 3, 2]] at temperature 1 and top_k 2 give scaled [[-inf, 0, -1]],
    log_normalizer [0.3133] and probabilities [[0, 0.7311, 0.2689]].
    """

    log_normalizer: Tensor
    """[T] fp32, log of the sum of exp(scaled), without the row's maximum, which would round away
    low bits of every probability."""

    @property
    @abstractmethod
    def scaled(self) -> Tensor:
        """[T, V] fp32, logits / temperature less the row's largest, -inf outside the support."""

    @abstractmethod
    def logprobs_of(self, token_ids: Tensor) -> Tensor:
        """[T] fp32 log-probability of one token per row; -inf outside the support."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """[T] fp32 entropy in nats."""

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

    written: Tensor  # [T, V] fp32, the scaled logits

    @property
    def scaled(self) -> Tensor:
        return self.written

    def logprobs_of(self, token_ids: Tensor) -> Tensor:
        picked = self.scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        return picked - self.log_normalizer

    def entropy(self) -> Tensor:
        probabilities = self.probabilities()
        return tree_sum(probabilities * self.surprise(probabilities))


@dataclass(frozen=True, eq=False, kw_only=True)
class ReducedDistribution(Distribution):
    """A distribution on CUDA. Methods read the given logits again, so those must not change."""

    logits: Tensor  # [T, V] fp32 with unit column stride, unscaled
    divisor: Tensor  # [T] fp32 temperatures, 1 where greedy
    unit_temperature: bool  # whether every divisor is known to be 1
    support: Tensor | None  # [2, T] int32 for `statistics_triton`; None: every id is in it
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

    def draw(self, uniforms: Tensor) -> Tensor:
        """[T] int64: the first id whose cumulative weight exceeds u times the total, u [T] fp64 in
        [0, 1). An id weighs floor(p * 2**52), with the exp of `ORDER`'s masses; a NaN row gives 0.
        """
        if uniforms.dtype != torch.float64 or uniforms.shape != self.log_normalizer.shape:
            raise ValueError(
                f"sampling: uniforms are {uniforms.dtype} {tuple(uniforms.shape)} for "
                f"{self.logits.shape[0]} rows; need fp64, one per row."
            )
        return vocabulary_draw(*self._rows, uniforms, self.unit_temperature)

    @property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return self.logits, self.divisor, self.support, self.top, self.log_normalizer
