"""The steps of a run, each told to its trackers and saved where that is due."""

from __future__ import annotations

from typing import Any

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.trainers.interrupts import endings_deferred
from rl_consistency.trainers.tracking.trackers import TrackerSet


def take_steps(run: Any, trackers: TrackerSet, first_step: int, *, begins: bool) -> None:
    """Take the steps of `run` that are left, after step 0 of a run that begins.

    A signal ends them after a step, and so does a tracker that fails once the metrics are on disk:
    the step is saved first.
    """
    # Logged first, saved second: no kill leaves a checkpoint without its metrics.
    if begins:
        failure = None
        if opening := run.opening_metrics():
            with run.world.agreed("the metrics"):
                failure = trackers.log(0, opening)
        run.save_if_due(0)
        with run.world.agreed("what is told of step 0"):
            if failure is not None:
                raise failure
    with endings_deferred(run.progress, speaks=run.first) as ending:
        for step in range(first_step, run.config.training.steps + 1):
            try:
                metrics = run.step(step)
            except ConsistencyError as error:
                trackers.log(step, error.metrics)
                raise
            with run.world.agreed("the metrics"):
                failure = trackers.log(step, metrics)
            number = ending.asked(run.world, failure)
            run.save_if_due(step, ends=number != 0)
            if number:
                ending.end(number)
