"""The feed of the drift monitor in a trainer of TRL, which finds completions by their tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from rl_consistency.integrations.sampled import Sampled
from rl_consistency.integrations.wandb_drift import log_drift
from rl_consistency.models.scoring.token_logprobs import LabelLogprobs
from rl_consistency.models.sharding import is_sharded
from rl_consistency.parity.drift import DriftReport, Sample, worst_tokens
from rl_consistency.parity.drift_monitor import FIRST, LATER, DriftMonitor, Seen
from rl_consistency.parity.histograms import split_counts
from rl_consistency.rollout.sampling_params import SamplingParams

REPLAY = "replay"
"""Where bundles go, in the output directory of a trainer."""


class _Drawn(NamedTuple):
    """A completion, or a turn of one, as it was sampled."""

    start: int
    """Where its tokens begin in a row."""
    logprobs: Tensor
    place: tuple[int, int]
    routing: Tensor | None


class _MicroBatch(NamedTuple):
    """What a trainer scored, on the model's device: comparing it at once would wait for that."""

    input_ids: Tensor  # [B, L]
    tokens: Tensor  # [B, L] bool, False at padding
    mask: Tensor  # [B, L-1] bool
    logprobs: Tensor  # [B, L-1]
    routing: Tensor | None  # [B, L-1]


class _Compared(NamedTuple):
    """What was drawn in a row that training scored, and the row up to its end."""

    sample: Sample
    routing: list[Tensor | None]
    """Of rollout and training; None in a dense model, and of engines that do not tell it."""
    row: np.ndarray  # [end]
    wanted: np.ndarray  # [drawn] bool, the tokens that are trained on
    drawn: np.ndarray  # [drawn]
    trained: np.ndarray  # [drawn], anything where it is not wanted


class RolloutDrift(TrainerCallback):
    """Remembers the logprobs of a rollout. When an optimizer step is done it gives the monitor
    these and the logprobs of training.

    A sample is found by its tokens: equal prompts and completions have equal logprobs.

    The first mismatch of a process is saved as a replay bundle, localized and told, unless
    `sampling`, what the tokens of a patched model are drawn with, is None. That happens when the
    step is over, and so with the weights after the step: the op that differs is the same, the
    logprobs are not those of the bundle. Gradients, random states and the mode of the model stay.
    An error ends up in the warning: training goes on.
    """

    def __init__(
        self, trainer: Any, sampling: SamplingParams | None = None, metrics_of: Sequence[str] = ()
    ) -> None:
        self._trainer, self._sampling = trainer, sampling
        self._monitor = DriftMonitor(
            model=trainer.model,
            replay_dir=None if sampling is None else Path(trainer.args.output_dir) / REPLAY,
            decode=None if sampling is None else trainer.processing_class.decode,
            metrics_of=metrics_of,
        )
        self._wandb_usable = True
        self._sampled_at = -1
        self._samples: dict[bytes, _Drawn] = {}
        self._prompts: dict[tuple[int, ...], list[int]] = {}
        """Prompt -> its number in the rollout, and how many completions it has."""
        self._uncompared = 0
        self._pending: dict[str, list[_MicroBatch]] = {FIRST: [], LATER: []}
        self._mismatch: tuple[DriftReport, list[_Compared]] | None = None
        self._told = sampling is None

    @property
    def report(self) -> DriftReport | None:
        """Drift of the first updates of this process; None before the first."""
        self._compare()
        return self._monitor.total

    def sampled(self, prompts: list[list[int]], completions: Sampled) -> None:
        """Take in a rollout, or a turn of one; a rollout at another step replaces the last. One for
        evaluation is passed over."""
        self._compare()
        if not self._trainer.model.training:
            return
        if self._sampled_at != self._trainer.state.global_step:
            self._samples.clear()
            self._prompts.clear()
            self._sampled_at = self._trainer.state.global_step
        routing = completions.routing or [None] * len(prompts)
        parts = (prompts, completions.token_ids, completions.logprobs, routing)
        for prompt, tokens, logprobs, met in zip(*parts, strict=True):
            key = np.asarray([*prompt, *tokens], dtype=np.int64).tobytes()
            known = self._prompts.setdefault(tuple(prompt), [len(self._prompts), 0])
            place = known[0], known[1]
            known[1] += 1
            self._samples[key] = _Drawn(len(prompt), logprobs, place, met)

    def observe(self, input_ids: Tensor, tokens: Tensor, scores: LabelLogprobs) -> None:
        """Take in a micro-batch of training; see `LabelAnswer`."""
        prefix = FIRST if self._sampled_at == self._trainer.state.global_step else LATER
        scored = scores.mask, scores.logprobs.detach(), scores.routing
        self._pending[prefix].append(_MicroBatch(input_ids, tokens, *scored))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compare()
        if self._mismatch is not None and self._sampling is not None:
            found, self._mismatch, self._told = self._mismatch, None, True
            self._tell(*found, self._sampling)

    def take(self) -> dict[str, float]:
        """Figures since the last call, over all processes, each of which has to call it."""
        self._compare()
        mine, self._uncompared = (self._monitor.take(), self._uncompared), 0
        everyone = gather_object([mine]) if self._trainer.accelerator.num_processes > 1 else [mine]
        found, seen = self._monitor.metrics(part for part, _ in everyone)
        self._show(seen)
        if uncompared := sum(count for _, count in everyone):
            found[f"{FIRST}/uncompared_tokens"] = uncompared
        # transformers puts "train/" before every name, as NeMo-RL does before its own.
        return {name.removeprefix("train/"): value for name, value in found.items()}

    def _compare(self) -> None:
        """Compare what was observed."""
        pending, self._pending = self._pending, {FIRST: [], LATER: []}
        for prefix, batches in pending.items():
            found = [each for batch in batches for each in self._scored(batch)]
            if not found:
                continue
            ours, theirs = map(_known, zip(*(f.routing for f in found), strict=True))
            report = self._monitor.scored([f.sample for f in found], (ours, theirs), prefix=prefix)
            if prefix == FIRST and not (report.passed or self._told or self._mismatch):
                self._mismatch = report, found

    def _show(self, seen: Seen) -> None:
        """Log histograms and the worst tokens with what the trainer logs next in wandb, where it
        has begun a run, and raise an alert if tokens differ. A failure costs one warning."""
        trainer, report = self._trainer, seen.reports[FIRST]
        if report is None or not self._wandb_usable or "wandb" not in trainer.args.report_to:
            return
        import wandb

        if wandb.run is None:  # as on all processes but the first
            return
        alert = f"step {trainer.state.global_step}: {report.sentence()}"
        alert = alert if report.mismatched_tokens or report.rerouted_tokens else None
        rows = worst_tokens(seen.samples, trainer.processing_class.decode)
        try:
            log_drift(wandb.run, {}, split_counts(seen.counts)[1], rows, alert, commit=False)
        except (OSError, wandb.Error) as error:
            self._wandb_usable = False
            warnings.warn(
                f"wandb shows no histograms and worst tokens from here on ({error}); training "
                "goes on",
                stacklevel=2,
            )

    def _tell(self, report: DriftReport, found: list[_Compared], sampling: SamplingParams) -> None:
        """Save the rows that differ, localize where they do, and warn."""
        trainer = self._trainer
        config = {
            "step": trainer.state.global_step,
            "process": trainer.accelerator.process_index,
            "weights": "after the step",
            "rollout": {"sampling": asdict(sampling)},
        }
        try:
            if report.mismatched_tokens and is_sharded(trainer.model):
                raise ValueError("the parameters are shards, and other processes take no part")
            _, where = self._monitor.kept(
                report,
                sequences=[f.row.tolist() for f in found],
                prompt_lengths=[len(f.row) - len(f.drawn) for f in found],
                rollout_logprobs=[torch.from_numpy(f.drawn) for f in found],
                # A token that is not trained on counts as found again.
                training_logprobs=[
                    torch.from_numpy(np.where(f.wanted, f.trained, f.drawn)) for f in found
                ],
                sampling=sampling,
                config=config,
            )
        except (ValueError, RuntimeError, OSError) as error:  # shards, no memory, a full disk
            where = f"They were not saved for replay ({error}). "
        warnings.warn(
            f"step {config['step']}, process {config['process']}: {report.sentence()}. {where}"
            "Training goes on, and later mismatches are only counted",
            stacklevel=2,
        )

    def _scored(self, batch: _MicroBatch) -> Iterator[_Compared]:
        """The sampled tokens of a micro-batch, and their rows; those of no sample are counted."""
        # Rows are many and short, which NumPy cuts in a fraction of torch's time.
        ids, tokens = batch.input_ids.cpu().numpy(), batch.tokens.cpu().numpy()
        scored, logprobs = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
        scored[:, 1:], logprobs[:, 1:] = batch.mask.cpu(), batch.logprobs.cpu()
        met = np.zeros(ids.shape, np.int64)
        if batch.routing is not None:
            met[:, 1:] = batch.routing.cpu()
        parts = (ids, tokens, scored, logprobs, met)
        for row, real, wanted, theirs, routed in zip(*parts, strict=True):
            row, wanted, theirs, routed = row[real], wanted[real], theirs[real], routed[real]
            first, end, count = len(wanted), 0, np.count_nonzero(wanted)
            for start, drawn, place, experts in self._found(row, int(count)):
                # TRL may have cut the last turn: the row ends within it.
                first, end = min(first, start), min(start + len(drawn), len(row))
                chosen, sides = wanted[start:end], (drawn[: end - start].numpy(), theirs[start:end])
                if picked := row[start:end][chosen].tolist():
                    sample = Sample(picked, place, *(torch.from_numpy(s[chosen]) for s in sides))
                    routing = None if batch.routing is None else torch.from_numpy(routed[start:])
                    at = torch.from_numpy(chosen).nonzero().squeeze(1)
                    met = [None if each is None else each[at] for each in (experts, routing)]
                    yield _Compared(sample, met, row[:end], chosen, *sides)
            # Between two turns stands what a tool wrote: TRL scores it, and masks it in its loss.
            self._uncompared += int(count - np.count_nonzero(wanted[first:end]))

    def _found(self, ids: np.ndarray, wanted: int) -> list[_Drawn]:
        """What was sampled in a row: several turns if there are, of which TRL may have cut the
        last."""
        whole = self._samples.get(row := ids.tobytes())
        if whole is not None and len(whole.logprobs) >= wanted:
            return [whole]
        lengths = {len(key) // ids.itemsize for key in self._samples}
        keys = (ids[:length].tobytes() for length in sorted(lengths) if length <= len(ids))
        turns = [self._samples[key] for key in keys if key in self._samples]
        if whole is None:
            turns += [sample for key, sample in self._samples.items() if key.startswith(row)][:1]
        return turns


def _known(parts: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Routing of one side; None where there is none. ValueError where only a part has it."""
    known = [part for part in parts if part is not None]
    if 0 < len(known) < len(parts):
        raise ValueError(
            f"{len(parts) - len(known)} of {len(parts)} completions have no routing, the others do."
        )
    return known or None
