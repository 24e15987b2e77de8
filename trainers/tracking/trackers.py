"""Where the metrics of a step go, trackers such as the console and wandb, and what a run says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from rl_consistency.trainers.config.sections import WandbSection
from rl_consistency.trainers.run_directory.step_files import Metrics
from rl_consistency.trainers.tracking.console import ConsoleTable
from rl_consistency.trainers.tracking.wandb_tracker import WandbTracker


class Tracker(Protocol):
    """Receives the metrics of each step, steps strictly ascending, and whether the run failed."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


class TrackerSet:
    """Several trackers as one; a context manager that closes them all, even if one fails.

    The run failed where the block raises or sets `failed`.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = list(trackers)
        self.failed = False

    def log(self, step: int, metrics: Metrics) -> BaseException | None:
        """Tell all trackers. The first one, of the run's files, may raise. The error of another is
        returned, such as that of a console whose reader has left."""
        failure: BaseException | None = None
        for index, tracker in enumerate(self._trackers):
            try:
                tracker.log(step, metrics)
            except (OSError, ValueError, SystemExit) as error:  # rich exits where its reader left
                if index == 0:
                    raise
                failure = failure or error
        return failure

    def __enter__(self) -> TrackerSet:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close, failed=self.failed or error is not None)


Say = Callable[[str], None]


class RunOutput:
    """Says lines by `say`. While it `defers`, a failure is kept, and nothing more is said."""

    def __init__(self, say: Say) -> None:
        self._say = self.guard(say)
        self.defers = False
        self.failure: BaseException | None = None

    def __call__(self, line: str) -> None:
        self._say(line)

    def guard(self, say: Say) -> Say:
        """Another way to say lines, under the same rule."""

        def guarded(line: str) -> None:
            if self.failure is not None:
                return
            try:
                say(line)
            except (OSError, ValueError, SystemExit) as error:  # rich exits where its reader left
                if not self.defers:
                    raise
                self.failure = error

        return guarded


def trackers_of(run: Any, wandb: WandbSection | None) -> list[Tracker]:
    """The files of the run's steps, and what its recipe names; `wandb` is of `check_wandb`."""
    config = run.config
    trackers: list[Tracker] = [run.step_files]
    if config.tracking.console:
        trackers.append(ConsoleTable(config.training.steps, progress=run.progress))
    if wandb is not None:
        tracker = WandbTracker(
            wandb.project,
            directory=config.run.output_dir,
            name=wandb.name or config.run.name,
            config=config.model_dump(mode="json"),
            mode=wandb.mode,
            run_id=run.wandb_run_id,
            samples=lambda: run.trainer.samples,
            take_mismatch=run.hook.take_mismatch,
            decode=run.tokenizer.decode,
            warn=run.announce,
        )
        trackers.append(tracker)
    return trackers
