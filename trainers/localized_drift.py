"""What a run and its trackers say of a rollout whose logprobs training did not find again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from rl_consistency.models.scoring.scored_rows import Sampling
from rl_consistency.parity.drift import DriftReport
from rl_consistency.parity.worst_tokens import WorstToken, worst_tokens


class Sampled(Protocol):
    """What is read of a rollout."""

    @property
    def sequences(self) -> Sequence[Sequence[int]]: ...
    @property
    def prompt_lengths(self) -> Sequence[int]: ...
    @property
    def places(self) -> Sequence[tuple[int, int]]: ...
    @property
    def logprobs(self) -> Sequence[Tensor]: ...
    @property
    def sampling(self) -> Sampling: ...


class Mismatch(NamedTuple):
    """A rollout whose logprobs training did not find again."""

    rollout: Sampled
    training_logprobs: Sequence[Tensor]
    message: str
    bundle: Path | None
    """Where this process saved the replay bundle."""

    def worst(self, decode: Callable[[list[int]], str]) -> list[WorstToken]:
        """The tokens that differ most."""
        rollout = self.rollout
        pairs = zip(rollout.sequences, rollout.prompt_lengths, strict=True)
        completions = [sequence[length:] for sequence, length in pairs]
        places = rollout.places or [(index, 0) for index in range(len(completions))]
        sides = rollout.logprobs, self.training_logprobs
        return worst_tokens(completions, places, *sides, decode)


def drift_message(report: DriftReport, bundle: Path | None, where: str) -> str:
    """What a run says of a mismatch; `where` is a sentence of `localized`, or empty."""
    rerouted = "" if not report.rerouted_tokens else f", {report.rerouted_tokens} met other experts"
    saved = "saved by rank 0" if report.mismatched_tokens else "none, since no logprob differs"
    return (
        f"{report.mismatched_tokens} of {report.tokens} tokens have other logprobs in training "
        f"than in rollout (largest difference {report.max_abs_diff:g}, {report.max_ulp} ULP, "
        f"{report.nonfinite_tokens} not finite{rerouted}). "
        f"Replay bundle: {bundle or saved}. "
        f"{where}Run `rl-consistency localize` on it, or `rl-consistency verify`, to see which op "
        "differs"
    )
