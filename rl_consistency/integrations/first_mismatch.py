"""The first mismatch of an attachment: saved for replay, and localized."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_consistency.models.sharding import is_sharded
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.drift import DriftReport
from rl_consistency.parity.localize import localized
from rl_consistency.parity.replay import save_replay_bundle
from rl_consistency.rollout.sampling_params import SamplingParams

REPLAY = "replay"
"""Where bundles go, in the output directory of a trainer."""


class ScoredRow(NamedTuple):
    """A row of training up to the end of a completion, or of a turn."""

    ids: Tensor  # [end]
    start: int
    """Where the completion begins."""
    wanted: Tensor  # [end - start] bool, the tokens that are trained on
    sampled: Tensor  # [end - start]
    trained: Tensor  # [end - start], anything where it is not wanted


class FirstMismatch:
    """Saves the tokens of a process's first mismatch as a replay bundle and localizes them, once.

    Both happen when the optimizer step is over, and so with the weights after the step: the op that
    differs is the same, the logprobs are not those of the bundle. Gradients, random states and the
    mode of the model stay. An error ends up in the warning: training goes on.
    """

    def __init__(self, trainer: Any, sampling: SamplingParams) -> None:
        self._trainer, self._sampling = trainer, sampling
        self._noted: tuple[DriftReport, Sequence[ScoredRow]] | None = None
        self._told = False

    def note(self, report: DriftReport, rows: Sequence[ScoredRow]) -> None:
        """Keep what a first update compared, if it is the first to differ."""
        if self._noted is None and not (report.passed or self._told):
            self._noted = report, rows

    def tell(self) -> None:
        """Save, localize and warn, if there is something new to tell; the step is over."""
        if self._noted is None:
            return
        (report, rows), self._noted, self._told = self._noted, None, True
        trainer, where = self._trainer, ""
        try:
            if report.mismatched_tokens:
                path = self._saved(rows)
                where = f"Replay bundle: {path}. {localized(trainer.model, path, self._sampling)}"
        except (ValueError, RuntimeError, OSError) as error:  # shards, no memory, a full disk
            where = f"They were not saved for replay ({error}). "
        rerouted = f", {report.rerouted_tokens} met other experts" if report.rerouted_tokens else ""
        warnings.warn(
            f"step {trainer.state.global_step}, process {trainer.accelerator.process_index}: "
            f"{report.mismatched_tokens} of {report.tokens} tokens have other logprobs in training "
            f"than in generation (largest difference {report.max_abs_diff:g}{rerouted}). {where}"
            "Training goes on, and later mismatches are only counted",
            stacklevel=2,
        )

    def _saved(self, rows: Sequence[ScoredRow]) -> Path:
        trainer, model = self._trainer, self._trainer.model
        if is_sharded(model):
            raise ValueError("the parameters are shards, and other processes do not take part")
        config = {
            "step": trainer.state.global_step,
            "process": trainer.accelerator.process_index,
            "weights": "after the step",
            "rollout": {"sampling": asdict(self._sampling)},
        }
        return save_replay_bundle(
            Path(trainer.args.output_dir) / REPLAY,
            sequences=[row.ids.tolist() for row in rows],
            rollout_logprobs=[row.sampled for row in rows],
            # A token that is not trained on counts as found again.
            training_logprobs=[torch.where(r.wanted, r.trained, r.sampled) for r in rows],
            prompt_lengths=[row.start for row in rows],
            config=config,
            parameter_digest=parameter_digest(model),
            fingerprint=fingerprint(next(model.parameters()).device),
            decode=trainer.processing_class.decode,
        )
