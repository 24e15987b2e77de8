"""Drift between what the engine sampled and what a trainer computes for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from rl_consistency.integrations.sampled import Sampled
from rl_consistency.integrations.token_drift import ScoredSample, TokenDrift
from rl_consistency.integrations.wandb_drift import AttachedWandb
from rl_consistency.models.token_logprobs import LabelLogprobs
from rl_consistency.parity.drift import DriftReport, DriftTotals, compare_logprobs

FIRST, LATER = "consistency", "off_policy"
"""Prefixes of what is logged: of the first update on a rollout, whose weights are those that
sampled it, and of later updates, which differ by design."""


class _Sample(NamedTuple):
    start: int
    """Where its tokens begin in a row."""
    logprobs: Tensor
    place: tuple[int, int]


class RolloutDrift:
    """Remembers the logprobs of a rollout and compares those of training with them.

    A sample is found by its tokens: equal prompts and completions have equal logprobs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tokens = TokenDrift()
        self._wandb = AttachedWandb(trainer)
        self._sampled_at = -1
        self._samples: dict[bytes, _Sample] = {}
        self._prompts: dict[tuple[int, ...], list[int]] = {}
        """Prompt -> its number in the rollout, and how many completions it has."""
        self._since_log = {FIRST: DriftTotals(), LATER: DriftTotals()}
        self._uncompared = 0
        self.total = DriftTotals()
        """Of the first updates of this process."""

    def also_log(self, metrics_of: Sequence[str]) -> None:
        """Log the drift metrics of these trainers too; see `foreign_drift`."""
        self._tokens = TokenDrift(metrics_of)

    def sampled(self, prompts: list[list[int]], completions: Sampled) -> None:
        """Take in a rollout, or a turn of one; a rollout at another step replaces the last. One for
        evaluation is passed over."""
        if not self._trainer.model.training:
            return
        if self._sampled_at != self._trainer.state.global_step:
            self._samples.clear()
            self._prompts.clear()
            self._sampled_at = self._trainer.state.global_step
        parts = (prompts, completions.token_ids, completions.logprobs)
        for prompt, tokens, logprobs in zip(*parts, strict=True):
            key = np.asarray([*prompt, *tokens], dtype=np.int64).tobytes()
            known = self._prompts.setdefault(tuple(prompt), [len(self._prompts), 0])
            place = known[0], known[1]
            known[1] += 1
            self._samples[key] = _Sample(len(prompt), logprobs, place)

    def observe(self, input_ids: Tensor, tokens: Tensor, scores: LabelLogprobs) -> None:
        """Compare a micro-batch of training; see `LabelAnswer`."""
        found: list[ScoredSample] = []
        scored = torch.zeros_like(tokens)
        scored[:, 1:] = scores.mask
        logprobs = torch.zeros(tokens.shape, device=tokens.device)
        logprobs[:, 1:] = scores.logprobs.detach()
        parts = (input_ids.cpu(), tokens.cpu(), scored.cpu(), logprobs.cpu())
        for ids, real, wanted, row in zip(*parts, strict=True):
            ids, wanted, row = ids[real], wanted[real], row[real]
            first, end = len(wanted), 0
            for start, sampled, place in self._found(ids.numpy(), int(wanted.sum())):
                first, end = min(first, start), start + len(sampled)
                span = slice(start, end)
                drawn, ours, theirs = (
                    part[wanted[span]] for part in (ids[span], sampled, row[span])
                )
                found.append(ScoredSample(drawn.tolist(), place, ours, theirs))
            # Between two turns stands what a tool wrote: TRL scores it, and masks it in its loss.
            self._uncompared += int(wanted.sum()) - int(wanted[first:end].sum())
        count = sum(len(sample.tokens) for sample in found)
        if count:
            report = compare_logprobs([s.sampled for s in found], [s.trained for s in found])
            first = self._sampled_at == self._trainer.state.global_step
            self._since_log[FIRST if first else LATER].add(report)
            if first:
                self.total.add(report)
                self._tokens.add(found)

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
            turns += [s._replace(logprobs=s.logprobs[: len(ids) - s.start]) for s in longer][:1]
        return turns

    def take(self) -> dict[str, float]:
        """Figures since the last call, over all processes, each of which has to call it."""
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
