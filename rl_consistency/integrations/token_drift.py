"""What first updates show of single tokens, between two calls of a trainer's `log`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rl_consistency.parity.drift import mismatched_sequences
from rl_consistency.parity.foreign_drift import foreign_drift
from rl_consistency.parity.histograms import drift_histograms
from rl_consistency.parity.worst_tokens import WorstToken, worst_tokens


class ScoredSample(NamedTuple):
    """A completion, or a turn of one, as both sides scored it."""

    tokens: list[int]
    place: tuple[int, int]
    """Which prompt of the rollout, and which completion of it."""
    sampled: Tensor
    trained: Tensor


class TokenDrift:
    """Counts for histograms, the samples that differ, and all samples where `metrics_of` names
    trainers whose figures need them."""

    def __init__(self, metrics_of: Sequence[str] = ()) -> None:
        self._metrics_of = tuple(metrics_of)
        self._counts: Counter[str] = Counter()
        self._samples: list[ScoredSample] = []

    def add(
        self, samples: Sequence[ScoredSample], sampled: Tensor, trained: Tensor, *, differ: bool
    ) -> None:
        """Take in samples on the CPU; `sampled` and `trained` are theirs, joined, and `differ` says
        whether any token does."""
        self._counts.update(drift_histograms([sampled], [trained]))
        if self._metrics_of:
            self._samples += samples
        elif differ:
            sides = [s.sampled for s in samples], [s.trained for s in samples]
            self._samples += [samples[i] for i in mismatched_sequences(*sides)]

    def take(self) -> tuple[Counter[str], list[ScoredSample]]:
        """What was added since the last call; processes exchange it."""
        taken = self._counts, self._samples
        self._counts, self._samples = Counter(), []
        return taken

    def joined(
        self, everyone: Iterable[tuple[Counter[str], list[ScoredSample]]]
    ) -> tuple[dict[str, float], Counter[str], list[ScoredSample]]:
        """Figures by other trainers' definitions, counts and samples of all processes."""
        counts: Counter[str] = Counter()
        samples: list[ScoredSample] = []
        for mine, part in everyone:
            counts.update(mine)
            samples += part
        figures: dict[str, float] = {}
        if self._metrics_of and samples:
            sides = [s.sampled for s in samples], [s.trained for s in samples]
            found = foreign_drift(self._metrics_of, *sides)
            # transformers puts "train/" before every name, as NeMo-RL does before its own.
            figures = {name.removeprefix("train/"): value for name, value in found.items()}
        return figures, counts, samples


def worst_of(samples: Sequence[ScoredSample], decode: Callable[[Any], str]) -> list[WorstToken]:
    """The tokens that differ most."""
    return worst_tokens(
        [sample.tokens for sample in samples],
        [sample.place for sample in samples],
        [sample.sampled for sample in samples],
        [sample.trained for sample in samples],
        decode,
    )
