"""The drift monitor: what rollout and training gave for the same tokens, compared, counted, kept.

The trainers' loop feeds it through `ConsistencyHook`, trainers of TRL through `attach`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rl_consistency.models.scoring.scored_rows import Sampling
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.drift import (
    DriftReport,
    Sample,
    compare_logprobs,
    mismatched_sequences,
    total_of,
)
from rl_consistency.parity.foreign_drift import check_known, foreign_drift
from rl_consistency.parity.histograms import drift_histograms
from rl_consistency.parity.localize import localized
from rl_consistency.parity.replay import save_replay_bundle

FIRST, LATER = "consistency", "off_policy"
"""Prefixes of what is logged: of the first update on a rollout, whose weights are those that
sampled it, and of later updates, which differ by design."""

Routing = tuple[Sequence[Tensor] | None, Sequence[Tensor] | None]
"""Of rollout and training, as `compare_logprobs` takes it."""


class Mismatch(NamedTuple):
    """Samples whose logprobs training did not find again, as trackers show them."""

    samples: Sequence[Sample]
    message: str
    bundle: Path | None
    """Where this process saved the replay bundle."""


class Seen(NamedTuple):
    """What a process compared since it was last asked; plain data that processes exchange."""

    reports: dict[str, DriftReport | None]
    """By prefix."""
    counts: Counter[str]
    """Of `drift_histograms`."""
    samples: list[Sample]
    """Those that differ; all, where figures of other trainers are asked for."""


@dataclass(eq=False, kw_only=True)
class DriftMonitor:
    """Compares the two sides of samples, and keeps what did not match for replay."""

    model: Any
    """The patched policy, or a wrapper around it."""
    replay_dir: Path | None
    """Where replay bundles go; None where nothing is saved, as on a rank that sees the same as
    another."""
    decode: Callable[[list[int]], str] | None = None
    """The text of token ids, for a bundle's worst tokens; None leaves their texts out."""
    metrics_of: Sequence[str] = ()
    """Trainers whose drift metrics are logged too: see `foreign_drift`."""
    total: DriftReport | None = None
    """Drift of all first updates; None before the first."""

    def __post_init__(self) -> None:
        check_known(self.metrics_of)
        self._has_localized = False
        self._seen = Seen({}, Counter(), [])

    def scored(
        self, samples: Sequence[Sample], routing: Routing = (None, None), *, prefix: str = FIRST
    ) -> DriftReport:
        """Compare samples that training has scored. `routing` is that of their tokens."""
        sides = [s.rollout for s in samples], [s.training for s in samples]
        report = compare_logprobs(*sides, routing=routing)
        seen = self._seen
        seen.reports[prefix] = total_of([seen.reports.get(prefix), report])
        if prefix == FIRST:
            self.total = total_of([self.total, report])
            seen.counts.update(drift_histograms(*sides))
            if self.metrics_of:
                seen.samples.extend(samples)
            elif not report.passed:
                seen.samples.extend(samples[i] for i in mismatched_sequences(*sides))
        return report

    def take(self) -> Seen:
        """What was compared since the last call."""
        seen, self._seen = self._seen, Seen({}, Counter(), [])
        return seen

    def metrics(self, everyone: Iterable[Seen]) -> tuple[dict[str, float], Seen]:
        """What is logged of that, with its joined counts and samples, from all processes."""
        all_seen = list(everyone)
        reports = {p: total_of(seen.reports.get(p) for seen in all_seen) for p in (FIRST, LATER)}
        counts = sum((seen.counts for seen in all_seen), Counter[str]())
        samples = [sample for seen in all_seen for sample in seen.samples]
        figures: dict[str, float] = {}
        for prefix, report in reports.items():
            figures |= report.metrics(prefix) if report else {}
        if self.metrics_of and samples:
            sides = [s.rollout for s in samples], [s.training for s in samples]
            figures |= foreign_drift(self.metrics_of, *sides)
        return figures, Seen(reports, counts, samples)

    def kept(
        self, report: DriftReport, *, sampling: Sampling, **batch: Any
    ) -> tuple[Path | None, str]:
        """Save the sequences that differ as a replay bundle, and localize the first bundle.

        Returns its path, and what the message of the mismatch says of it: where it is and, of the
        first, where drift begins or why that is not known. `batch`, with its config, and errors
        are those of `save_replay_bundle`.
        """
        if not report.mismatched_tokens:
            return None, "Replay bundle: none, since no logprob differs. "
        if self.replay_dir is None:
            return None, "Replay bundle: saved by rank 0. "
        bundle = save_replay_bundle(
            self.replay_dir,
            **batch,
            parameter_digest=parameter_digest(self.model),
            fingerprint=fingerprint(next(self.model.parameters()).device),
            decode=self.decode,
        )
        first, self._has_localized = not self._has_localized, True
        where = localized(self.model, bundle, sampling) if first else ""
        return bundle, f"Replay bundle: {bundle}. {where}"
