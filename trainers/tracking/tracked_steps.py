"""The steps of a run, each told to its trackers and saved where that is due."""

from __future__ import annotations

from typing import Any

from rl_consistency.models.sharding import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.weights import model_digest
from rl_consistency.trainers.interrupts import Ending, endings_deferred
from rl_consistency.trainers.optimizer import GradientNormError
from rl_consistency.trainers.rewards.function import RewardError
from rl_consistency.trainers.run_directory.checkpoint import StepEnd, checkpoint_name
from rl_consistency.trainers.run_directory.directory import CHECKPOINTS
from rl_consistency.trainers.tracking.trackers import TrackerSet

COMMON = (RewardError, GradientNormError)
"""Errors of a step that all processes raise together."""


def take_steps(run: Any, trackers: TrackerSet, first_step: int, *, begins: bool) -> None:
    """Take the steps of `run` that are left, after step 0 of a run that begins.

    A signal ends them after a step, and so do trackers and output that fail once the metrics are on
    disk, and rewards that fail in an evaluation: the step is saved first.
    """
    run.announce.defers = True
    if run.progress.listener is not None:
        run.progress.listener = run.announce.guard(run.progress.listener)

    def failure(of_trackers: BaseException | None) -> BaseException | None:
        return of_trackers or run.announce.failure or run.failure

    # Logged first, saved second: no kill leaves a checkpoint without its metrics.
    if begins:
        of_trackers = None
        if opening := run.opening_metrics():
            with run.world.agreed("the metrics"):
                of_trackers = trackers.log(0, opening)
        run.save_if_due(0)
        Ending.raise_common(run.world, failure(of_trackers))
    with endings_deferred(run.progress, speaks=run.first) as ending:
        for step in range(first_step, run.config.training.steps + 1):
            try:
                metrics = _step(run, step)
            except ConsistencyError as error:
                trackers.log(step, error.metrics)
                raise
            with run.world.agreed("the metrics"):
                of_trackers = trackers.log(step, metrics)
            number = ending.asked(run.world, failure(of_trackers))
            run.save_if_due(step, ends=number != 0)
            if number:
                ending.end(number)
    run.announce.defers = False


def _step(run: Any, step: int) -> dict[str, Any]:
    """One step. Where it ends before anything was learned, as rewards fail or logprobs drift, the
    step before is saved."""
    before, begun = run.state(), run.optimizer.begun
    try:
        return run.step(step)
    except (*COMMON, ConsistencyError) as error:
        # Of drift one process may not know what another has met.
        common = isinstance(error, COMMON) or run.world.size == 1
        if common and run.optimizer.begun == begun:
            _save_unlearned(run, step, before)
        raise


def _save_unlearned(run: Any, step: int, before: StepEnd) -> None:
    """Write the checkpoint of the step before `step`, unless somebody has written to the weights
    since."""
    name, begins = checkpoint_name(step - 1), step == 1 and not run.config.warm_start.steps
    stands = (run.directory / CHECKPOINTS / name).exists
    if begins or run.world.from_first("the checkpoints", stands):
        return
    with whole_weights(run.model):
        kept = model_digest(run.model) == run.trainer.weights_digest
    told = f"step {step} ended before anything was learned"
    try:
        if kept:
            run.save(step - 1, before)
        run.announce(f"{told}; {name} is {'' if kept else 'not '}saved")
    except (OSError, ValueError) as error:
        run.announce(f"{told}; {name} is not saved: {error}")
