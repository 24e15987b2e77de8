"""The hook of a training loop: methods that measure consistency, step by step.

The loop itself does not measure. Its hook measures, records and, if told so, stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rl_consistency.kernels.matmul.audit import schedule_audit
from rl_consistency.models.patch import patched_session
from rl_consistency.models.scoring.scored_rows import Sampling
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.parity.digest import each_digest, joint_digest, list_digest
from rl_consistency.parity.drift import DriftReport, Sample, compare_logprobs, total_of
from rl_consistency.parity.drift_monitor import DriftMonitor, Mismatch
from rl_consistency.parity.gradients import GradientReport, check_gradients
from rl_consistency.parity.stock import shadow_stock_path, within_budget
from rl_consistency.trainers.run_directory.manifest import list_files
from rl_consistency.trainers.run_directory.step_files import Digests

OnDrift = Literal["raise", "warn", "record"]
Metrics = dict[str, float | int | str | bool]


@dataclass(kw_only=True)
class Rollout:
    """What was sampled in one step, in logical order."""

    step: int
    """Number of the step, counted from 1."""
    sequences: Sequence[Sequence[int]]  # prompt and completion ids
    prompt_lengths: Sequence[int]
    logprobs: Sequence[Tensor]
    """[completion length] fp32 each, as the rollout gave them."""
    sampling: Sampling
    places: Sequence[tuple[int, int]] = ()
    """Prompt id and sample of each sequence."""
    routing: Sequence[Tensor] | None = None
    """[completion length] each, `expert_fingerprints` of the tokens; None in a dense model."""

    def samples(self, training: Sequence[Tensor]) -> list[Sample]:
        """The completions beside the logprobs that training gave them."""
        places = self.places or [(index, 0) for index in range(len(self.sequences))]
        given = self.sequences, self.prompt_lengths, places, self.logprobs, training
        parts = zip(*given, strict=True)
        return [Sample(ids[n:], place, *sides) for ids, n, place, *sides in parts]


def regrouped(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    count: int | None,
    **given: Any,
) -> GradientReport:
    """Compare the gradients there are with those of the whole packed batch, and of the first
    `count` sequences (None: all) with those of other groupings; `given` to `check_gradients`."""
    check = partial(check_gradients, model, **given)
    whole = check(sequences, prompt_lengths=prompt_lengths, regroupings=(), compare_present=True)
    some = check(sequences[:count], prompt_lengths=prompt_lengths[:count])
    bad, nonzero = whole.non_finite + some.non_finite, min(whole.nonzero, some.nonzero)
    return GradientReport(whole.results + some.results, whole.elements, nonzero, bad)


NOTABLE_SECONDS = 5.0
"""What looks at a step is called slow from here on, where it takes longer than the rest."""
REMEDIES = {
    "shadow": "lower consistency.shadow_budget or raise shadow_every",
    "gradient_check": "lower consistency.gradient_check_sequences or raise gradient_check_every",
    "critic_gradient_check": "raise consistency.gradient_check_every",
    "value_check": "raise consistency.value_check_every",
}


def slow_checks(metrics: Mapping[str, Any]) -> list[str]:
    """What took longer than the rest of the step of these metrics, each with its remedy."""
    seconds = {name: metrics.get(f"time/{name}_seconds", 0.0) for name in REMEDIES}
    rest = metrics["time/step_seconds"] - sum(seconds.values())
    return [
        f"the {name.replace('_', ' ')} took {took:.0f} s, the step without checks {rest:.0f} s; "
        f"{REMEDIES[name]}"
        for name, took in seconds.items()
        if took > max(rest, NOTABLE_SECONDS)
    ]


COUNTED = {
    "value_check/values": "values_checked",
    "value_check/mismatched_values": "values_mismatched",
    "gradient_check/checks": "gradient_checks",
    "gradient_check/passed": "gradient_checks_passed",
    "gradient_check/without_gradient": "gradient_checks_without_gradient",
    "gradient_check/mismatched_elements": "gradient_mismatched_elements",
}
"""What a run counts beside drift: the name in its summary -> that in a checkpoint."""


@dataclass(eq=False)
class ConsistencyHook:
    """Measures drift, checks gradients, takes digests, measures the stock path.

    A training loop calls its `on_` methods. Each returns metrics to log with the step. Options are
    those of a recipe's `consistency` section and, like `replay_dir`, of `DriftMonitor`.

    Raises: ConsistencyError when the fingerprints of the two sides differ, or on drift.
    """

    model: nn.Module
    """The patched policy."""
    _: KW_ONLY
    gradient_check_every: int = 0
    value_check_every: int = 0
    shadow_every: int = 0
    shadow_budget: int | None = None
    micro_batch_size: int | None = None
    """Sequences of one stock training pass, whose speed is measured too; None leaves it out."""
    on_drift: OnDrift = "raise"
    metrics_of: Sequence[str] = ()
    replay_dir: Path | None
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, saved with a bundle."""
    decode: Callable[[list[int]], str] | None = None
    expected_fingerprint: Fingerprint | None = None
    """Fingerprint of the other side, when rollout and training are different programs."""
    warn: Callable[[str], None] = print
    """Called with one line when `on_drift` is `warn`, and when a check compared nothing or less."""
    progress: Callable[[str], None] = lambda phase: None
    """Told what begins that takes long."""

    def __post_init__(self) -> None:
        self._session = patched_session(self.model)
        self._device = next(self.model.parameters()).device
        self.fingerprint = fingerprint(self._device)
        expected = self.expected_fingerprint or self.fingerprint
        if difference := self.fingerprint.difference(expected):
            raise ConsistencyError(
                f"the two sides cannot give the same bits: {'; '.join(difference)}. Use the same "
                "versions, device, thread count and strictness on both."
            )
        self.monitor = DriftMonitor(
            model=self.model,
            replay_dir=self.replay_dir,
            decode=self.decode,
            metrics_of=self.metrics_of,
        )
        self.stock: DriftReport | None = None
        self.counted = dict.fromkeys(COUNTED.values(), 0)
        audit = schedule_audit()
        self._is_cut_told = False
        self._judged = audit.differing - audit.found  # sampled elements judged before
        self._rollout: Rollout | None = None
        self._mismatch: Mismatch | None = None
        self._digest_seconds = 0.0
        self._digests: dict[str, str | dict[str, str]] = {}

    def on_rollout(self, rollout: Rollout) -> Metrics:
        """Completions were sampled; the weights have not changed since."""
        self._rollout, self._digests = rollout, {}
        if rollout.step == 1:
            self._digest("initial_weights", each_digest, self.model)
        ids = [torch.from_numpy(np.array(i)) for i in (*rollout.sequences, rollout.prompt_lengths)]
        self._digest("tokens", list_digest, ids)
        self._digest("logprobs", list_digest, rollout.logprobs)
        return {}

    def on_training_logprobs(
        self, logprobs: Sequence[Tensor], routing: Sequence[Tensor] | None = None
    ) -> Metrics:
        """Training recomputed the logprobs of the rollout's tokens under the same weights; in a
        sparse model also which experts they met."""
        rollout = self._current
        samples = rollout.samples(logprobs)
        report = self.monitor.scored(samples, (rollout.routing, routing))
        self._digest("training_logprobs", list_digest, logprobs)
        figures, seen = self.monitor.metrics([self.monitor.take()])
        metrics: Metrics = {**figures, **seen.counts}
        if not report.passed:
            bundle, where = self.monitor.kept(
                report,
                sequences=rollout.sequences,
                prompt_lengths=rollout.prompt_lengths,
                rollout_logprobs=rollout.logprobs,
                training_logprobs=logprobs,
                sampling=rollout.sampling,
                config={**self.config, "step": rollout.step},
            )
            if bundle is not None and self.replay_dir is not None:
                list_files(self.replay_dir.parent, bundle)
            message = (
                f"{report.sentence()}. {where}Run `rl-consistency localize` on it, or "
                "`rl-consistency verify`, to see which op differs"
            )
            self._mismatch = Mismatch(samples, message, bundle)
            self._drifted(message, metrics)
        if self._due(self.shadow_every):
            metrics |= self._shadow(rollout)
        return metrics

    def on_values(self, values: Sequence[Tensor], again: Callable[[], list[Tensor]]) -> Metrics:
        """A critic gave the values of the rollout's tokens; `again` computes them under another
        grouping. Only in PPO, before advantages are made."""
        self._digest("values", list_digest, values)
        if not self._due(self.value_check_every):
            return {}
        started = perf_counter()
        report = compare_logprobs(list(values), again())
        self.counted["values_checked"] += report.tokens
        self.counted["values_mismatched"] += report.mismatched_tokens
        metrics: Metrics = {
            "consistency/value_check/values": report.tokens,
            "consistency/value_check/mismatched_values": report.mismatched_tokens,
            "time/value_check_seconds": perf_counter() - started,
        }
        if not report.passed:
            message = (
                f"{report.mismatched_tokens} of {report.tokens} values of the critic depend on how "
                f"the batch was cut (largest difference {report.max_abs_diff:g}). Run "
                "`rl-consistency verify` to see which op differs"
            )
            self._drifted(message, metrics)
        return metrics

    def on_gradients(
        self, gradients: Mapping[str, Tensor], check: Callable[[], GradientReport]
    ) -> Metrics:
        """The gradients of a rollout's first optimizer step, by name, are complete and not yet
        clipped; `check` compares them with others of the same step."""
        each = self._digest("gradients", each_digest, gradients)
        metrics: Metrics = {"consistency/gradient_digest": joint_digest(each)}
        return metrics | self._compared("gradient_check", check)

    def on_value_gradients(self, check: Callable[[], GradientReport]) -> Metrics:
        """The same of a critic, in PPO."""
        return self._compared("critic_gradient_check", check, "critic: ")

    def on_step_end(self) -> Metrics:
        """All optimizer steps on this rollout are done."""
        self._digest("weights", each_digest, self.model)
        metrics: Metrics = {"time/digest_seconds": self._digest_seconds}
        self._digest_seconds = 0.0
        if self._device.type == "cuda":
            self._audit_schedules(metrics)
        self._rollout = None
        return metrics

    def take_digests(self) -> Digests:
        """Digests of the step so far, in the order of their making; they are given once."""
        taken, self._digests = self._digests, {}
        return taken

    def take_mismatch(self) -> Mismatch | None:
        """What trackers show of the step if it drifted; it is given once."""
        taken, self._mismatch = self._mismatch, None
        return taken

    def summary(self) -> dict[str, Any]:
        """Totals over the run, by the names of the metrics."""
        found: dict[str, Any] = {}
        for path, report in (("consistency", self.monitor.total), ("stock", self.stock)):
            found |= report.metrics(path) if report else {}
        for name, kept in COUNTED.items():
            if self.counted["values_checked"] or not name.startswith("value"):
                found[f"consistency/{name}"] = self.counted[kept]
        return found | {"consistency/fingerprint": self.fingerprint.digest}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        drift = {"drift": self.monitor.total, "stock": self.stock}
        return {**self.counted, **{k: asdict(r) if r else {} for k, r in drift.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint."""
        self.counted = {name: state.get(name, 0) for name in COUNTED.values()}
        drift = (state[name] for name in ("drift", "stock"))
        self.monitor.total, self.stock = (DriftReport(**d) if d else None for d in drift)

    def _digest(self, name: str, digest_of: Callable[[Any], Any], tensors: Any) -> Any:
        """Keep the digest of some tensors; its seconds are added to those of the step."""
        started = perf_counter()
        self._digests[name] = found = digest_of(tensors)
        self._digest_seconds += perf_counter() - started
        return found

    def _shadow(self, rollout: Rollout) -> Metrics:
        self.progress("stock shadow")
        started = perf_counter()
        whole, prompts = rollout.sequences, rollout.prompt_lengths
        sequences = within_budget(whole, prompts, self.shadow_budget)
        if (tokens := sum(map(len, sequences))) < sum(map(len, whole)) and not self._is_cut_told:
            self._is_cut_told = True
            self.warn(
                f"step {rollout.step}: the stock path was measured on {len(sequences)} of "
                f"{len(whole)} completions, at most {self.shadow_budget} tokens of each "
                "(consistency.shadow_budget; null = all)"
            )
        shadow = shadow_stock_path(
            self._session,
            sequences,
            prompts[: len(sequences)],
            temperature=rollout.sampling.temperature,
            micro_batch_size=self.micro_batch_size,
        )
        self.stock = total_of([self.stock, shadow.drift])
        metrics: Metrics = {**shadow.drift.metrics("stock"), **shadow.counts}
        speed = shadow.drift.tokens / shadow.rollout_seconds
        metrics["time/stock_rollout_tokens_per_second"] = speed
        if shadow.training_seconds is not None:
            metrics["time/stock_training_tokens_per_second"] = tokens / shadow.training_seconds
        metrics["time/shadow_seconds"] = perf_counter() - started
        return metrics

    def _audit_schedules(self, metrics: Metrics) -> None:
        """Read what the sampled checks of library schedules found so far."""
        report = schedule_audit()
        metrics["consistency/schedule_audit"] = report.differing
        # Not `found`: the engine reads the audit too, and what it has read still counts here.
        before, self._judged = self._judged, report.differing
        if report.differing > before:
            message = (
                "library matrix products differ from the canonical order in "
                f"{report.differing} sampled elements ({report.audited} of {report.calls} calls "
                f"were sampled); withdrawn: {', '.join(report.withdrawn)}. Resume from the last "
                "checkpoint, which will not use them"
            )
            self._drifted(message, metrics)

    def _compared(self, name: str, check: Callable[[], GradientReport], whose: str = "") -> Metrics:
        if not self._due(self.gradient_check_every):
            return {}
        self.progress(f"{whose}gradient check")
        started = perf_counter()
        report = check()
        empty = report.without_gradient
        self.counted["gradient_checks"] += not empty
        self.counted["gradient_checks_passed"] += report.passed
        self.counted["gradient_checks_without_gradient"] += empty
        self.counted["gradient_mismatched_elements"] += report.mismatched_elements
        metrics: Metrics = {
            f"consistency/{name}/without_gradient": empty,
            f"consistency/{name}/mismatched_elements": report.mismatched_elements,
            f"time/{name}_seconds": perf_counter() - started,
        }
        if not empty:
            metrics[f"consistency/{name}/passed"] = report.passed
        failure = report.failure()
        if empty:
            self.warn(f"step {self._current.step}: {whose}{failure}")
        elif failure:
            self._drifted(f"{whose}{failure}. Run `rl-consistency verify`", metrics)
        return metrics

    def _drifted(self, message: str, metrics: Metrics) -> None:
        message = f"step {self._current.step}: {message}, or set consistency.on_drift to warn."
        if self.on_drift == "raise":
            raise ConsistencyError(message, metrics=metrics)
        if self.on_drift == "warn":
            self.warn(message)

    @property
    def _current(self) -> Rollout:
        if self._rollout is None:
            raise ValueError("on_rollout must be called before the other methods of a step.")
        return self._rollout

    def _due(self, every: int) -> bool:
        return every > 0 and (self._current.step - 1) % every == 0
