"""Where the metrics of a step go: the run's files, the console, services such as wandb; what a run
says, and when its steps end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from time import monotonic
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.progress import shown_rate
from rl_consistency.rollout.weights import model_digest
from rl_consistency.trainers.config.sections import WandbSection
from rl_consistency.trainers.interrupts import Ending
from rl_consistency.trainers.optimizer import GradientNormError
from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.reward_functions import RewardError
from rl_consistency.trainers.run_directory.checkpoint import checkpoint_name
from rl_consistency.trainers.run_directory.directory import CHECKPOINTS
from rl_consistency.trainers.run_directory.step_files import Metrics
from rl_consistency.trainers.services import WandbTracker, services_of

Say = Callable[[str], None]

OUTPUT_ERRORS = (OSError, ValueError, SystemExit)
"""Of a console that cannot be written to; rich exits where its reader has left."""


class TrackerSet:
    """Several trackers as one; a context manager that closes them all, even if one fails.

    Each is told the metrics of a step, `log(step, metrics)`, and at the end `close(failed=...)`:
    the run failed where the block raises or sets `failed`.
    """

    def __init__(self, trackers: Iterable[Any]) -> None:
        self._trackers = list(trackers)
        self.failed = False

    def log(self, step: int, metrics: Metrics) -> BaseException | None:
        """Tell all trackers. The first one, of the run's files, may raise. The error of another is
        returned, such as that of a console whose reader has left."""
        failure: BaseException | None = None
        for index, tracker in enumerate(self._trackers):
            try:
                tracker.log(step, metrics)
            except OUTPUT_ERRORS as error:
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
            try:
                if self.failure is None:
                    say(line)
            except OUTPUT_ERRORS as error:
                if not self.defers:
                    raise
                self.failure = error

        return guarded


class _Column(NamedTuple):
    header: str
    key: str
    text: Callable[[Any], str]
    style: Callable[[Any], str] = lambda _: ""
    empty: str = ""
    """A metric that says that there was nothing to look at."""

    def cell(self, metrics: Metrics) -> Text:
        if self.key not in metrics:
            return Text("no gradient" if metrics.get(self.empty) else "-", style="dim")
        value = metrics[self.key]
        return Text(self.text(value), style=self.style(value))


def _verdict(bad: Any) -> str:
    return "bold red" if bad else "green"


_COLUMNS = (
    _Column("reward", "reward/mean", "{:.3f}".format, lambda _: "bold"),
    _Column("eval", "eval/reward", "{:.3f}".format),
    _Column("loss", "loss", "{:z.4f}".format),
    _Column("tokens/s", "tokens_per_second", shown_rate),
    _Column("mismatched", "consistency/mismatched_tokens", "{:,.0f}".format, _verdict),
    _Column("stock mismatch", "stock/mismatch_fraction", "{:.1%}".format, lambda _: "yellow"),
    _Column(
        "gradient check",
        "consistency/gradient_check/passed",
        lambda passed: "passed" if passed else "FAILED",
        lambda passed: _verdict(not passed),
        empty="consistency/gradient_check/without_gradient",
    ),
)
_HEADERS = ("step", *(column.header for column in _COLUMNS))


class ConsoleTable:
    """The last `rows` steps as a live table, and `progress` below it; plain lines where the output
    is not a terminal, of progress one a minute."""

    QUIET_SECONDS, REFRESH_SECONDS = 60.0, 0.2

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        console: Console | None = None,
        rows: int = 12,
        progress: Progress | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._console = console or Console()
        self._of_total = "" if total_steps is None else f"/{total_steps}"
        self._clock, self._last_told, self._progress = clock, clock(), ""
        if progress is not None:
            progress.listener = self.tell
        self._recent: deque[list[Text]] = deque(maxlen=rows)
        self._live: Live | None = None

    def tell(self, line: str) -> None:
        """How far the step is."""
        live = self._console.is_terminal
        quiet = self.REFRESH_SECONDS if live else self.QUIET_SECONDS
        if self._clock() - self._last_told >= quiet:
            self._last_told, self._progress = self._clock(), line
            if live:
                self._refresh()
            else:
                self._print(line)

    def log(self, step: int, metrics: Metrics) -> None:
        self._last_told, self._progress = self._clock(), ""
        row = [Text(f"{step}{self._of_total}"), *(column.cell(metrics) for column in _COLUMNS)]
        lines = [[cell.plain for cell in row]]
        if not self._recent:
            lines.insert(0, list(_HEADERS))
        self._recent.append(row)
        if self._console.is_terminal:
            self._refresh()
            return
        widths = [9, *(max(len(header), 10) for header in _HEADERS[1:])]
        for line in lines:
            self._print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))

    def close(self, *, failed: bool = False) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is None:
            # auto_refresh would start a thread, and draw frames between two steps.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
        table.caption = self._progress or None
        for header in _HEADERS:
            # Of two lines where it has two words: 80 columns hold all.
            table.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in self._recent:
            table.add_row(*row)
        self._live.update(table, refresh=True)


def trackers_of(run: Any, wandb: WandbSection | None) -> list[Any]:
    """The files of the run's steps, and what its recipe names; `wandb` is of `check_wandb`."""
    config = run.config
    trackers: list[Any] = [run.step_files]
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
            **wandb.model_dump(include={"entity", "group", "tags"}),
        )
        trackers.append(tracker)
    return [*trackers, *services_of(run)]


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
    with Ending(run.progress, speaks=run.first) as ending:
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


def _save_unlearned(run: Any, step: int, before: dict[str, Any]) -> None:
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
