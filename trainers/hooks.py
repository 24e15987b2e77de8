"""How consistency enters a trainer: one object with four methods, called once a step each.

A training loop knows nothing of drift. It tells its hook what was rolled out, what training
recomputed, that gradients are ready, and that the step is over; the hook measures, records and, if
told so, stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from rl_consistency.kernels.matmul.audit import AuditReport, schedule_audit
from rl_consistency.models.patch import patched_session
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.parity.digest import gradient_digest, parameter_digest
from rl_consistency.parity.drift import DriftReport, DriftTotals, compare_logprobs
from rl_consistency.parity.gradients import (
    REGROUPINGS,
    GradientReport,
    LossFunction,
    Regrouping,
    check_gradients,
)
from rl_consistency.parity.replay import save_replay_bundle
from rl_consistency.parity.stock import shadow_stock_path

OnDrift = Literal["raise", "warn", "record"]
Metrics = dict[str, float | int | str | bool]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What was sampled in one step, in logical order."""

    step: int
    """Counted from 1."""
    sequences: Sequence[Sequence[int]]
    """Prompt and completion ids."""
    prompt_lengths: Sequence[int]
    """Prompt tokens of each sequence."""
    logprobs: Sequence[Tensor]
    """[completion length] fp32 each, as the rollout gave them."""
    sampling: Any
    """The parameters they were sampled with."""


@dataclass(frozen=True, kw_only=True)
class GradientStep:
    """One optimizer step, before clipping: enough to compute its gradients again."""

    sequences: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]
    sampling: Any
    loss: LossFunction
    """Share of the loss of some of the sequences, weighted by global counts."""
    first_of_step: bool
    """Whether it is the first optimizer step on this rollout."""


class TrainerHook(Protocol):
    """What a training loop calls. Each method returns metrics to log with the step."""

    def on_rollout(self, rollout: Rollout) -> Metrics:
        """Completions were sampled; the weights have not changed since."""
        ...

    def on_training_logprobs(self, logprobs: Sequence[Tensor]) -> Metrics:
        """Training recomputed the logprobs of the rollout's tokens under the same weights."""
        ...

    def on_gradients(self, step: GradientStep) -> Metrics:
        """Gradients of one optimizer step are complete and not yet clipped."""
        ...

    def on_step_end(self) -> Metrics:
        """All optimizer steps on this rollout are done."""
        ...


@dataclass
class Totals:
    """What a run has measured so far; goes into checkpoints and the summary."""

    drift: DriftTotals = field(default_factory=DriftTotals)
    stock: DriftTotals = field(default_factory=DriftTotals)
    gradient_checks: int = 0
    gradient_checks_passed: int = 0
    gradient_mismatched_elements: int = 0


class ConsistencyHook:
    """Measures drift, checks gradients, takes digests, shadows the stock path.

    Args:
        model: the patched policy.
        gradient_check_every: steps between gradient checks; 0 is never.
        gradient_check_sequences: how many of a step's sequences are regrouped in a check, the first
            ones; None is all. The step's own gradients are always computed again as a whole.
        shadow_every: steps between measurements of the stock path; 0 is never.
        micro_batch_size: sequences of one stock training pass, whose speed is measured too; None
            leaves it out.
        on_drift: `raise` stops the run, `warn` calls `warn`, `record` only logs. Differing tokens
            are saved as a replay bundle first in all three. Of a library product that differs the
            rollout engine warns besides.
        replay_dir: where replay bundles go.
        config: the resolved configuration, saved with a bundle.
        expected_fingerprint: the other side's, when rollout and training are different programs.
        warn: called with one line when `on_drift` is `warn`.

    Raises:
        ConsistencyError: the two sides' fingerprints differ.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gradient_check_every: int = 0,
        gradient_check_sequences: int | None = None,
        shadow_every: int = 0,
        micro_batch_size: int | None = None,
        on_drift: OnDrift = "raise",
        replay_dir: Path,
        config: Mapping[str, Any] | None = None,
        expected_fingerprint: Fingerprint | None = None,
        warn: Callable[[str], None] = print,
    ):
        self._model = model
        self._session = patched_session(model)
        self._gradient_check_every = gradient_check_every
        self._gradient_check_sequences = gradient_check_sequences
        self._shadow_every = shadow_every
        self._micro_batch_size = micro_batch_size
        self._on_drift = on_drift
        self._replay_dir = replay_dir
        self._config = dict(config or {})
        self._warn = warn
        self._device = next(model.parameters()).device
        self.fingerprint = fingerprint(self._device)
        if expected_fingerprint is not None:
            require_same_fingerprint(self.fingerprint, expected_fingerprint)
        self.totals = Totals()
        audit = schedule_audit()
        self._judged = audit.differing - audit.found  # sampled elements judged before
        self._rollout: Rollout | None = None
        self._digest_seconds = 0.0

    def on_rollout(self, rollout: Rollout) -> Metrics:
        self._rollout = rollout
        return {}

    def on_training_logprobs(self, logprobs: Sequence[Tensor]) -> Metrics:
        rollout = self._required_rollout()
        report = compare_logprobs(list(rollout.logprobs), list(logprobs))
        self.totals.drift.add(report)
        metrics: Metrics = dict(report.metrics("consistency"))
        if not report.passed:
            bundle = self._save_replay(rollout, logprobs)
            self._drifted(_drift_message(rollout.step, report, bundle), metrics)
        if self._due(self._shadow_every, rollout.step):
            metrics |= self._shadow(rollout)
        return metrics

    def on_gradients(self, step: GradientStep) -> Metrics:
        if not step.first_of_step:
            return {}
        started = perf_counter()
        metrics: Metrics = {"consistency/gradient_digest": gradient_digest(self._model)}
        self._digest_seconds += perf_counter() - started
        if self._due(self._gradient_check_every, self._required_rollout().step):
            metrics |= self._check_gradients(step)
        return metrics

    def on_step_end(self) -> Metrics:
        step = self._required_rollout().step
        self._rollout = None
        started = perf_counter()
        metrics: Metrics = {"consistency/parameter_digest": parameter_digest(self._model)}
        self._digest_seconds += perf_counter() - started
        metrics["time/digest_seconds"] = self._digest_seconds
        self._digest_seconds = 0.0
        if self._device.type == "cuda":
            self._audit_schedules(step, metrics)
        return metrics

    def summary(self) -> dict[str, Any]:
        """Totals over the run, by the names of the metrics."""
        totals = self.totals
        found: dict[str, Any] = {}
        if totals.drift.report is not None:
            found |= totals.drift.report.metrics("consistency")
        if totals.stock.report is not None:
            found |= totals.stock.report.metrics("stock")
        return found | {
            "consistency/gradient_check/checks": totals.gradient_checks,
            "consistency/gradient_check/passed": totals.gradient_checks_passed,
            "consistency/gradient_check/mismatched_elements": totals.gradient_mismatched_elements,
            "consistency/fingerprint": self.fingerprint.digest,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        state = {k: v for k, v in asdict(self.totals).items() if isinstance(v, int)}
        return state | {
            "drift": self.totals.drift.state_dict(),
            "stock": self.totals.stock.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint."""
        counts = {k: v for k, v in state.items() if k not in ("drift", "stock")}
        self.totals = Totals(**counts)
        self.totals.drift.load_state_dict(state["drift"])
        self.totals.stock.load_state_dict(state["stock"])

    def _shadow(self, rollout: Rollout) -> Metrics:
        started = perf_counter()
        shadow = shadow_stock_path(
            self._session,
            rollout.sequences,
            rollout.prompt_lengths,
            temperature=rollout.sampling.temperature,
            micro_batch_size=self._micro_batch_size,
        )
        self.totals.stock.add(shadow.drift)
        metrics: Metrics = dict(shadow.drift.metrics("stock"))
        metrics["time/stock_rollout_tokens_per_second"] = (
            shadow.drift.tokens / shadow.rollout_seconds
        )
        if shadow.training_seconds is not None:
            tokens = sum(len(sequence) for sequence in rollout.sequences)
            metrics["time/stock_training_tokens_per_second"] = tokens / shadow.training_seconds
        metrics["time/shadow_seconds"] = perf_counter() - started
        return metrics

    def _audit_schedules(self, step: int, metrics: Metrics) -> None:
        """Read what the sampled checks of library schedules found so far."""
        report = schedule_audit()
        metrics["consistency/schedule_audit"] = report.differing
        # Not `found`: the engine reads the audit too, and what it was told is still to be judged.
        before, self._judged = self._judged, report.differing
        if report.differing > before:
            self._drifted(_audit_message(step, report), metrics)

    def _check_gradients(self, step: GradientStep) -> Metrics:
        started = perf_counter()
        count = self._gradient_check_sequences or len(step.sequences)
        as_trained = self._gradients_again(step, len(step.sequences), (), compare_present=True)
        regrouped = self._gradients_again(step, count, REGROUPINGS, compare_present=False)
        report = GradientReport(as_trained.results + regrouped.results, as_trained.elements)
        self.totals.gradient_checks += 1
        self.totals.gradient_checks_passed += report.passed
        self.totals.gradient_mismatched_elements += report.mismatched_elements
        metrics: Metrics = {
            "consistency/gradient_check/passed": report.passed,
            "consistency/gradient_check/mismatched_elements": report.mismatched_elements,
            "time/gradient_check_seconds": perf_counter() - started,
        }
        if not report.passed:
            self._drifted(_gradient_message(self._required_rollout().step, report), metrics)
        return metrics

    def _gradients_again(
        self,
        step: GradientStep,
        count: int,
        regroupings: Sequence[Regrouping],
        *,
        compare_present: bool,
    ) -> GradientReport:
        return check_gradients(
            self._model,
            step.sequences[:count],
            prompt_lengths=step.prompt_lengths[:count],
            loss=step.loss,
            sampling=step.sampling,
            regroupings=regroupings,
            compare_present=compare_present,
        )

    def _save_replay(self, rollout: Rollout, logprobs: Sequence[Tensor]) -> Path:
        return save_replay_bundle(
            self._replay_dir,
            sequences=rollout.sequences,
            rollout_logprobs=[t.detach() for t in rollout.logprobs],
            training_logprobs=[t.detach() for t in logprobs],
            prompt_lengths=rollout.prompt_lengths,
            config={**self._config, "step": rollout.step},
            parameter_digest=parameter_digest(self._model),
            fingerprint=self.fingerprint,
        )

    def _drifted(self, message: str, metrics: Metrics) -> None:
        if self._on_drift == "raise":
            raise ConsistencyError(message, metrics=metrics)
        if self._on_drift == "warn":
            self._warn(message)

    def _required_rollout(self) -> Rollout:
        if self._rollout is None:
            raise ValueError("on_rollout must be called before the other methods of a step.")
        return self._rollout

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and (step - 1) % every == 0


def require_same_fingerprint(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Refuse to compare bits of two programs that add in different orders.

    Raises:
        ConsistencyError: names every entry that differs.
    """
    difference = ours.difference(theirs)
    if difference:
        raise ConsistencyError(
            f"the two sides cannot give the same bits: {'; '.join(difference)}. Use the same "
            "versions, device, thread count and strictness on both."
        )


def _drift_message(step: int, report: DriftReport, bundle: Path) -> str:
    return (
        f"step {step}: {report.mismatched_tokens} of {report.tokens} tokens have other logprobs in "
        f"training than in rollout (largest difference {report.max_abs_diff:g}, "
        f"{report.max_ulp} ULP, {report.nonfinite_tokens} not finite). Replay bundle: {bundle}. "
        "Run `rl-consistency verify` to see which op differs, or set consistency.on_drift to warn."
    )


def _audit_message(step: int, report: AuditReport) -> str:
    return (
        f"step {step}: library matrix products differ from the canonical order in "
        f"{report.differing} sampled elements ({report.audited} of {report.calls} calls were "
        f"sampled); withdrawn: {', '.join(report.struck)}. Continue from the last checkpoint "
        "(--resume), which will not use them, or set consistency.on_drift to warn."
    )


def _gradient_message(step: int, report: GradientReport) -> str:
    return (
        f"step {step}: gradients depend on how the batch was cut, in {report.mismatched_elements} "
        f"elements, first in {report.first_parameter}. Run `rl-consistency verify`, or set "
        "consistency.on_drift to warn."
    )
