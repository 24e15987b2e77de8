"""What wandb shows of drift: histograms, a table of the worst tokens, an alert, a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_consistency.parity.drift import WorstToken
from rl_consistency.parity.histograms import ABS_DIFF, Histogram
from rl_consistency.parity.metric_table import WORST_TOKENS

if TYPE_CHECKING:
    import wandb

Counts = Mapping[Histogram, Mapping[str, int]]

ALERT = "Rollout and training logprobs differ"
ALERT_EVERY = timedelta(minutes=30)
"""wandb sends no second alert of the same title before."""
_LIKE_ZERO = -9.0
"""The bin of equal logprobs ends here on wandb's axis of log10 |difference|."""


def log_drift(
    run: wandb.Run,
    figures: Mapping[str, Any],
    counts: Counts,
    rows: Sequence[WorstToken],
    message: str | None,
    **options: Any,
) -> None:
    """Log a step's figures with its histograms and, where there are any, its worst tokens.

    `message` is the text of an alert, which goes out before the rest; `options` are `run.log`'s.
    """
    import wandb

    if message is not None:
        run.alert(title=ALERT, text=message, level="ERROR", wait_duration=ALERT_EVERY)
    shown: dict[str, Any] = {
        histogram.wandb: wandb.Histogram(np_histogram=_bars(histogram, found))
        for histogram, found in counts.items()
    }
    if rows:
        shown[WORST_TOKENS] = wandb.Table(
            columns=list(WorstToken._fields), data=[list(row) for row in rows]
        )
    run.log({**figures, **shown}, **options)


def log_file(run: wandb.Run, path: Path, kind: str) -> None:
    """Keep a file as an artifact of this kind; nothing where there is no such file."""
    if not path.is_file():
        return
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    artifact.add_file(str(path))
    run.log_artifact(artifact)


def _bars(histogram: Histogram, counts: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Counts and finite edges, as `wandb.Histogram` takes them."""
    bars = np.asarray([counts.get(name, 0) for name in histogram.bins])
    if histogram.exact == ABS_DIFF.exact:
        # A linear axis has no room for decades: the edges are logarithms.
        edges = [math.log10(edge) for edge in histogram.edges[1:-1]]
        return bars, np.asarray([_LIKE_ZERO - 1, _LIKE_ZERO, *edges, 1.0])
    at = histogram.edges.index(histogram.exact)
    width = (histogram.edges[at + 1] - histogram.exact) / 2
    inner = [*histogram.edges[: at + 1], histogram.exact + width, *histogram.edges[at + 1 : -1]]
    return bars, np.asarray([*inner, 2 * histogram.edges[-2]])
