"""Drift between what the engine sampled and what a trainer computes for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from rl_consistency.integrations.first_mismatch import FirstMismatch, ScoredRow
from rl_consistency.integrations.sampled import Sampled
from rl_consistency.integrations.token_drift import ScoredSample, TokenDrift
from rl_consistency.integrations.wandb_drift import AttachedWandb
from rl_consistency.models.scoring.label_logprobs import LabelLogprobs
from rl_consistency.parity.drift import DriftReport, DriftTotals, compare_logprobs
from rl_consistency.rollout.sampling_params import SamplingParams

FIRST, LATER = "consistency", "off_policy"
"""Prefixes of what is logged: of the first update on a rollout, whose weights are those that
sampled it, and of later updates, which differ by design."""


class _Sample(NamedTuple):
    start: int
    """Where its tokens begin in a row."""
    logprobs: Tensor
    place: tuple[int, int]
    routing: Tensor | None

    def cut(self, tokens: int) -> _Sample:
        """The sample cut to its first tokens."""
        routing = None if self.routing is None else self.routing[:tokens]
        return self._replace(logprobs=self.logprobs[:tokens], routing=routing)


class _MicroBatch(NamedTuple):
    """What a trainer scored, on the model's device: comparing it at once would wait for that."""

    first: bool
    input_ids: Tensor  # [B, L]
    tokens: Tensor  # [B, L] bool, False at padding
    mask: Tensor  # [B, L-1] bool
    logprobs: Tensor  # [B, L-1]
    routing: Tensor | None  # [B, L-1]


class _Compared(NamedTuple):
    """The sampled tokens of a row that training scored."""

    sample: ScoredSample
    row: ScoredRow
    routing: tuple[Tensor | None, Tensor | None]
    """Routing of both sides; None in a dense model, and of engines that do not tell it."""


class RolloutDrift(TrainerCallback):
    """Remembers the logprobs of a rollout, and compares those of training with them when an
    optimizer step is done.

    A sample is found by its tokens: equal prompts and completions have equal logprobs. The first
    mismatch is localized at the end of its step, unless `sampling`, what the tokens of a patched
    model are drawn with, is None.
    """

    def __init__(self, trainer: Any, sampling: SamplingParams | None = None) -> None:
        self._trainer = trainer
        self._first = None if sampling is None else FirstMismatch(trainer, sampling)
        self._tokens = TokenDrift()
        self._wandb = AttachedWandb(trainer)
        self._sampled_at = -1
        self._samples: dict[bytes, _Sample] = {}
        self._prompts: dict[tuple[int, ...], list[int]] = {}
        """Prompt -> its number in the rollout, and how many completions it has."""
        self._since_log = {FIRST: DriftTotals(), LATER: DriftTotals()}
        self._uncompared = 0
        self._total = DriftTotals()
        self._pending: list[_MicroBatch] = []

    @property
    def total(self) -> DriftTotals:
        """Drift of the first updates of this process."""
        self._compare()
        return self._total

    def also_log(self, metrics_of: Sequence[str]) -> None:
        """Log the drift metrics of these trainers too; see `foreign_drift`."""
        self._tokens = TokenDrift(metrics_of)

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
            self._samples[key] = _Sample(len(prompt), logprobs, place, met)

    def observe(self, input_ids: Tensor, tokens: Tensor, scores: LabelLogprobs) -> None:
        """Take in a micro-batch of training; see `LabelAnswer`."""
        first = self._sampled_at == self._trainer.state.global_step
        scored = scores.mask, scores.logprobs.detach()
        self._pending.append(_MicroBatch(first, input_ids, tokens, *scored, scores.routing))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compare()
        if self._first is not None:
            self._first.tell()

    def _compare(self) -> None:
        """Compare what was observed."""
        pending, self._pending = self._pending, []
        for first in (True, False):
            found = [s for batch in pending if batch.first is first for s in self._scored(batch)]
            if not found:
                continue
            samples, rows = [each.sample for each in found], [each.row for each in found]
            sides = torch.cat([s.sampled for s in samples]), torch.cat([s.trained for s in samples])
            routing = _joined([e.routing[0] for e in found]), _joined([e.routing[1] for e in found])
            report = compare_logprobs(*sides, routing=routing)
            self._since_log[FIRST if first else LATER].add(report)
            if first:
                self._total.add(report)
                self._tokens.add(samples, *sides, differ=not report.passed)
                if self._first is not None:
                    self._first.note(report, rows)

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
            for start, sampled, place, experts in self._found(row, int(count)):
                first, end = min(first, start), start + len(sampled)
                span = slice(start, end)
                parts = (row[span], sampled.numpy(), theirs[span])
                drawn, ours, trained = (part[wanted[span]] for part in parts)
                if len(drawn):
                    found = map(torch.from_numpy, (row[:end], wanted[span], theirs[span]))
                    upto, chosen, scores = found
                    whole = ScoredRow(upto, start, chosen, sampled, scores)
                    pair = torch.from_numpy(ours), torch.from_numpy(trained)
                    experts = None if experts is None else experts[chosen]
                    again = None
                    if batch.routing is not None:
                        again = torch.from_numpy(routed[span][wanted[span]])
                    sample = ScoredSample(drawn.tolist(), place, *pair)
                    yield _Compared(sample, whole, (experts, again))
            # Between two turns stands what a tool wrote: TRL scores it, and masks it in its loss.
            self._uncompared += int(count - np.count_nonzero(wanted[first:end]))

    def _found(self, ids: np.ndarray, wanted: int) -> list[_Sample]:
        """Where sampled tokens begin in a row, and their logprobs; several turns if there are, of
        which TRL may have cut the last."""
        whole = self._samples.get(row := ids.tobytes())
        if whole is not None and len(whole.logprobs) >= wanted:
            return [whole]
        lengths = {len(key) // ids.itemsize for key in self._samples}
        keys = (ids[:length].tobytes() for length in sorted(lengths) if length <= len(ids))
        turns = [self._samples[key] for key in keys if key in self._samples]
        if whole is None:
            longer = (sample for key, sample in self._samples.items() if key.startswith(row))
            turns += [s.cut(len(ids) - s.start) for s in longer][:1]
        return turns

    def take(self) -> dict[str, float]:
        """Figures since the last call, over all processes, each of which has to call it."""
        self._compare()
        reports = {name: t.state_dict() for name, t in self._since_log.items()}
        mine = [reports, self._uncompared, self._tokens.take()]
        everyone = gather_object([mine]) if self._trainer.accelerator.num_processes > 1 else [mine]
        self._since_log = {name: DriftTotals() for name in self._since_log}
        self._uncompared = 0
        figures: dict[str, float] = {}
        for name in (FIRST, LATER):
            totals = DriftTotals()
            for reports, _, _ in everyone:
                if reports[name]:
                    totals.add(DriftReport(**reports[name]))
            if totals.report is not None:
                figures |= totals.report.metrics(name)
        if uncompared := sum(count for _, count, _ in everyone):
            figures[f"{FIRST}/uncompared_tokens"] = uncompared
        by_others, counts, samples = self._tokens.joined(tokens for _, _, tokens in everyone)
        self._wandb.show(figures, counts, samples)
        return figures | by_others


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All routing of one side; None where there is none. ValueError where only a part has it."""
    known = [part for part in parts if part is not None]
    if 0 < len(known) < len(parts):
        raise ValueError(
            f"{len(parts) - len(known)} of {len(parts)} completions have no routing, the others do."
        )
    return torch.cat(known) if known else None
