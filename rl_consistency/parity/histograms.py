"""Histograms of drift with fixed bins, so that steps and processes can be added up.

A histogram is logged as counts, one metric for each bin that is not empty:
`consistency/logprob_abs_diff/count/0` holds the tokens whose logprobs are equal as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

NOT_FINITE = "nan"
"""The bin of what is not finite, in each histogram; it is drawn in none."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The bins of one quantity."""

    name: str
    """Name of the quantity, below a prefix."""
    exact: float
    """The value that has a bin of its own: that of no drift."""
    edges: tuple[float, ...]
    """Ascending, `exact` among them. A bin holds its lower edge, but for `exact`."""
    wandb: str
    """The name that wandb draws it by."""
    side: str = "consistency"
    """Prefix of its metrics."""

    @property
    def of_stock(self) -> Histogram:
        """The same of the stock path."""
        return replace(self, side="stock", wandb=self.wandb.replace(self.side, "stock", 1))

    @property
    def bins(self) -> list[str]:
        """Names of the bins, in ascending order."""
        names = []
        for low, high in pairwise(self.edges):
            names += [f"{low:g}"] if low == self.exact else []
            names.append(f"{low:g}..{high:g}")
        return names

    def counts(self, values: Tensor) -> dict[str, int]:
        """Bin -> number of values, without empty bins."""
        finite = values[values.isfinite()].double()
        # Edges, with the next number after `exact`: {exact} is a bin like the others.
        at = self.edges.index(self.exact)
        after = math.nextafter(self.exact, math.inf)
        cuts = [*self.edges[: at + 1], after, *self.edges[at + 1 : -1]]
        place = torch.bucketize(finite, torch.tensor(cuts[1:], dtype=torch.float64), right=True)
        found = torch.bincount(place, minlength=len(self.bins)).tolist()
        counts = {name: count for name, count in zip(self.bins, found, strict=True) if count}
        if missing := len(values) - len(finite):
            counts[NOT_FINITE] = missing
        return counts


ABS_DIFF = Histogram(
    name="logprob_abs_diff",
    exact=0.0,
    edges=(0.0, *(10.0**e for e in range(-8, 1)), math.inf),
    wandb="consistency/log10_abs_diff_histogram",
)
RATIO = Histogram(
    name="importance_ratio",
    exact=1.0,
    edges=(0.0, 0.5, 0.8, 0.9, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1, 1.2, 2.0, math.inf),
    wandb="consistency/importance_ratio_histogram",
)
HISTOGRAMS = (ABS_DIFF, RATIO)


def drift_histograms(
    rollout: Sequence[Tensor], training: Sequence[Tensor], side: str = "consistency"
) -> dict[str, int]:
    """The counts of |training - rollout| and of exp(training - rollout), by metric name."""
    d = torch.cat([t.detach().cpu().double() for t in training])
    d = d - torch.cat([t.detach().cpu().double() for t in rollout])
    values = {ABS_DIFF: d.abs(), RATIO: d.exp()}
    return {
        f"{side}/{histogram.name}/count/{name}": count
        for histogram, of in values.items()
        for name, count in histogram.counts(of).items()
    }


def split_counts(
    metrics: Mapping[str, object],
) -> tuple[dict[str, object], dict[Histogram, dict[str, int]]]:
    """Metrics without counts, and the counts of each histogram that was measured."""
    rest = dict(metrics)
    found: dict[Histogram, dict[str, int]] = {}
    for histogram in (*HISTOGRAMS, *(ours.of_stock for ours in HISTOGRAMS)):
        for name in (*histogram.bins, NOT_FINITE):
            count = rest.pop(f"{histogram.side}/{histogram.name}/count/{name}", None)
            if isinstance(count, int | float):
                found.setdefault(histogram, {})[name] = int(count)
    return rest, found
