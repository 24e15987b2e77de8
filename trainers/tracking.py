"""Where the metrics of a step go: any number of trackers, among them the console and wandb."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.metric_reference import references
from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.run_directory.metrics_file import Metrics


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

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def __enter__(self) -> TrackerSet:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close, failed=self.failed or error is not None)


class _Column(NamedTuple):
    header: str
    key: str
    text: Callable[[Any], str]
    style: Callable[[Any], str] = lambda _: ""


def _verdict(bad: Any) -> str:
    return "bold red" if bad else "green"


_COLUMNS = (
    _Column("reward", "reward/mean", "{:.3f}".format, lambda _: "bold"),
    _Column("eval", "eval/reward", "{:.3f}".format),
    _Column("loss", "loss", "{:+.4f}".format),
    _Column("tokens/s", "tokens_per_second", "{:,.0f}".format),
    _Column("mismatched", "consistency/mismatched_tokens", "{:,.0f}".format, _verdict),
    _Column("stock mismatch", "stock/mismatch_fraction", "{:.1%}".format, lambda _: "yellow"),
    _Column(
        "gradient check",
        "consistency/gradient_check/passed",
        lambda passed: "passed" if passed else "FAILED",
        lambda passed: _verdict(not passed),
    ),
)


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
        self._total_steps = total_steps
        self._clock, self._last_told, self._progress = clock, clock(), ""
        if progress is not None:
            progress.listener = self.tell
        self._recent: deque[tuple[int, Metrics]] = deque(maxlen=rows)
        self._live: Live | None = None
        self._header_shown = False

    def tell(self, line: str) -> None:
        """How far the step is."""
        quiet = self.REFRESH_SECONDS if self._console.is_terminal else self.QUIET_SECONDS
        if self._clock() - self._last_told < quiet:
            return
        self._last_told, self._progress = self._clock(), line
        if self._console.is_terminal:
            self._refresh()
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log(self, step: int, metrics: Metrics) -> None:
        self._last_told, self._progress = self._clock(), ""
        if not self._console.is_terminal:
            self._print_line(step, metrics)
            return
        self._recent.append((step, dict(metrics)))
        self._refresh()

    def _refresh(self) -> None:
        if self._live is None:
            # auto_refresh would start a thread, and draw frames between two steps.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def close(self, *, failed: bool = False) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _step(self, step: int) -> str:
        return str(step) if self._total_steps is None else f"{step}/{self._total_steps}"

    def _table(self) -> Table:
        table = Table(border_style="dim", header_style="bold", caption=self._progress or None)
        for header in ("step", *(column.header for column in _COLUMNS)):
            table.add_column(header, justify="right")
        for step, metrics in self._recent:
            table.add_row(self._step(step), *(_cell(column, metrics) for column in _COLUMNS))
        return table

    def _print_line(self, step: int, metrics: Metrics) -> None:
        lines = [[self._step(step), *(_cell(column, metrics).plain for column in _COLUMNS)]]
        if not self._header_shown:
            lines.insert(0, ["step", *(column.header for column in _COLUMNS)])
            self._header_shown = True
        widths = [9, *(max(len(column.header), 10) for column in _COLUMNS)]
        for line in lines:
            text = "  ".join(cell.rjust(width) for cell, width in zip(line, widths))
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cell(column: _Column, metrics: Metrics) -> Text:
    if column.key not in metrics:
        return Text("-", style="dim")
    value = metrics[column.key]
    return Text(column.text(value), style=column.style(value))


WANDB_MISSING = (
    "logging to Weights & Biases needs wandb, and wandb is not installed: "
    "pip install 'rl-consistency[wandb]', or set tracking.wandb to null in the recipe"
)


def check_wandb(mode: str) -> None:
    """ValueError where a run could not log there: wandb is missing, or is online without a login.

    On a terminal wandb asks for the key here, before any work.
    """
    if find_spec("wandb") is None:
        raise ValueError(WANDB_MISSING)
    if mode == "online":
        import wandb

        remedy = "set WANDB_API_KEY, run `wandb login`, or set tracking.wandb.mode to offline"
        try:
            known = wandb.login()
        except wandb.Error as error:
            raise ValueError(f"tracking.wandb.mode online: {error} ({remedy})") from error
        if not known:
            raise ValueError(f"tracking.wandb.mode online needs a key: {remedy}")


class WandbTracker:
    """Logs to Weights & Biases, into `directory`; the same `run_id` continues the same run.

    `samples` gives the completions of the logged step that people are shown, as a table.
    `mode` "offline" needs neither key nor network; upload later with `wandb sync`.

    Raises: ImportError when wandb is not installed, ValueError on another mode than the two and
    where wandb cannot begin the run.
    """

    def __init__(
        self,
        project: str,
        *,
        directory: str | os.PathLike[str],
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: str = "offline",
        run_id: str | None = None,
        samples: Callable[[], Sequence[Mapping[str, Any]]] = list,
    ) -> None:
        if mode not in ("offline", "online"):
            raise ValueError(f"wandb mode must be 'offline' or 'online', got {mode!r}")
        try:
            import wandb
        except ImportError as error:
            raise ImportError(WANDB_MISSING) from error
        self._samples = samples
        Path(directory).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=os.fspath(directory),
                config=dict(config or {}),
                mode=mode,
                id=run_id,
                resume=None if run_id is None else "allow",
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            raise ValueError(f"wandb cannot begin the run: {error}") from error
        for metric, reference in references():
            self._run.define_metric(metric, summary=reference.standing)

    def log(self, step: int, metrics: Metrics) -> None:
        tables = {"samples": self._table(rows)} if (rows := self._samples()) else {}
        self._run.log({**metrics, **tables}, step=step)

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        import wandb

        plain = {name for name, value in rows[0].items() if not isinstance(value, dict)}
        columns: list[Any] = [name for name in rows[0] if name in plain]
        return wandb.Table(columns, [[row[name] for name in columns] for row in rows])

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def trackers_of(
    config: RunConfig,
    wandb_run_id: str,
    samples: Callable[[], Sequence[Mapping[str, Any]]],
    progress: Progress,
) -> list[Tracker]:
    """Those that a recipe names, beside the metrics file."""
    wandb = config.tracking.wandb
    trackers: list[Tracker] = []
    if config.tracking.console:
        trackers.append(ConsoleTable(config.training.steps, progress=progress))
    if wandb is not None:
        tracker = WandbTracker(
            wandb.project,
            directory=config.run.output_dir,
            name=wandb.name or config.run.name,
            config=config.model_dump(mode="json"),
            mode=wandb.mode,
            run_id=wandb_run_id,
            samples=samples,
        )
        trackers.append(tracker)
    return trackers
