"""Where the metrics of a step go: a file that survives a kill, the console, Weights & Biases."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

Metric = float | int | bool | str
Metrics = Mapping[str, Metric]

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Tracker(Protocol):
    """Receives the metrics of each step, steps strictly ascending."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class TrackerSet:
    """Several trackers as one; a context manager that closes them all, even if one fails."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)

    def __enter__(self) -> TrackerSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsFile:
    """One JSON object per line and step, on disk before `log` returns.

    JSON has no NaN: non-finite numbers are written as the strings "nan", "inf" and "-inf", which
    `read_metrics` turns back.

    Args:
        path: the file; its directory is made if missing.
        resume_from: step of the checkpoint the run continues from. Lines of later steps are cut,
            and a last line that a kill left unfinished; None: the file must not hold anything yet.

    Raises:
        FileExistsError: the file holds lines and the run does not resume.
        FileNotFoundError: the run resumes and there is no file.
        ValueError: a line other than an unfinished last one is not a step's metrics.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_from: int | None = None) -> None:
        path = Path(path)
        self._last_step = -1
        if resume_from is not None:
            self._last_step = _cut_after(path, resume_from)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(
                f"{path} already holds the metrics of a run; resume that run, or choose another "
                "run directory"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one line.

        Raises:
            ValueError: the step is not above the last one, or `metrics` holds a "step" of its own.
            TypeError: a metric is not a number, a bool or a string.
            OSError: the disk is full; the file is left as it was.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} follows step {self._last_step}; steps must ascend")
        if "step" in metrics:
            raise ValueError("metrics must not hold 'step': it is the first argument of log")
        plain = {name: _plain(name, value) for name, value in metrics.items()}
        line = json.dumps({"step": step} | plain, allow_nan=False) + "\n"
        self._append(line.encode())
        self._last_step = step

    def _append(self, line: bytes) -> None:
        start = self._stream.seek(0, os.SEEK_END)
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._stream.name)
            os.fsync(self._stream.fileno())
        except OSError:
            self._stream.truncate(start)
            raise

    def close(self) -> None:
        self._stream.close()


def _plain(name: str, value: Metric) -> Metric:
    if not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"metric {name!r} must be a number, a bool or a string, got {type(value).__name__}; "
            "call .item() on a tensor"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All steps of a metrics file, in order, each with its "step".

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is truncated or not a step's metrics; names the file and the line.
    """
    path = Path(path)
    return [row for _, row in _rows(path, path.read_bytes())]


def _rows(path: Path, data: bytes) -> Iterable[tuple[int, dict[str, Any]]]:
    """(offset of the line's first byte, its metrics) for every line."""
    offset, last_step = 0, -1
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            remedy = (
                "a kill left it unfinished; resume the run, which drops it, or delete it"
                if not line.endswith(b"\n")
                else "repair or delete it"
            )
            raise ValueError(f"{path}, line {number}, is not JSON: {remedy}") from error
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or step <= last_step or not line.endswith(b"\n"):
            raise ValueError(
                f"{path}, line {number}, is not the metrics of a step after {last_step}: it must "
                'be one whole line, a JSON object with an ascending integer "step"'
            )
        yield offset, {name: _restored(value) for name, value in row.items()}
        offset, last_step = offset + len(line), step


def _restored(value: Any) -> Any:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _cut_after(path: Path, step: int) -> int:
    """Truncate after the last line of a step <= `step`; returns that line's step, or -1."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the run to resume has no metrics there")
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    end, last = len(whole), -1
    for offset, row in _rows(path, whole):
        if row["step"] > step:
            end = offset
            break
        last = row["step"]
    if end < len(data):
        os.truncate(path, end)
    return last


@dataclass(frozen=True)
class _Column:
    header: str
    key: str
    text: Callable[[Any], str]
    style: Callable[[Any], str] = lambda _: ""


_COLUMNS = (
    _Column("reward", "reward/mean", "{:.3f}".format, lambda _: "bold"),
    _Column("eval", "eval/reward", "{:.3f}".format),
    _Column("loss", "loss", "{:+.4f}".format),
    _Column("tokens/s", "tokens_per_second", "{:,.0f}".format),
    _Column(
        "mismatched",
        "consistency/mismatched_tokens",
        "{:,.0f}".format,
        lambda count: "bold red" if count else "green",
    ),
    _Column("stock mismatch", "stock/mismatch_fraction", "{:.1%}".format, lambda _: "yellow"),
    _Column(
        "gradient check",
        "consistency/gradient_check/passed",
        lambda passed: "passed" if passed else "FAILED",
        lambda passed: "green" if passed else "bold red",
    ),
)


class ConsoleTable:
    """The last steps as a live table; plain lines where the output is not a terminal.

    Args:
        total_steps: last step of the run, shown beside the current one.
        console: where to print; standard output by default.
        rows: steps kept in view.
    """

    def __init__(
        self, total_steps: int | None = None, *, console: Console | None = None, rows: int = 12
    ) -> None:
        self._console = console or Console()
        self._total_steps = total_steps
        self._recent: deque[tuple[int, Metrics]] = deque(maxlen=rows)
        self._live: Live | None = None
        self._header_shown = False

    def log(self, step: int, metrics: Metrics) -> None:
        if not self._console.is_terminal:
            self._print_line(step, metrics)
            return
        self._recent.append((step, dict(metrics)))
        if self._live is None:
            # Refreshed by hand: no thread of its own, and no frame between two steps.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _step(self, step: int) -> str:
        return str(step) if self._total_steps is None else f"{step}/{self._total_steps}"

    def _table(self) -> Table:
        table = Table(border_style="dim", header_style="bold")
        for header in ("step", *(column.header for column in _COLUMNS)):
            table.add_column(header, justify="right")
        for step, metrics in self._recent:
            table.add_row(self._step(step), *(_cell(column, metrics) for column in _COLUMNS))
        return table

    def _print_line(self, step: int, metrics: Metrics) -> None:
        widths = [max(len(column.header), 10) for column in _COLUMNS]
        if not self._header_shown:
            headers = [c.header.rjust(width) for c, width in zip(_COLUMNS, widths)]
            self._write("  ".join(["step".rjust(9), *headers]))
            self._header_shown = True
        cells = [_cell(c, metrics).plain.rjust(width) for c, width in zip(_COLUMNS, widths)]
        self._write("  ".join([self._step(step).rjust(9), *cells]))

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cell(column: _Column, metrics: Metrics) -> Text:
    if column.key not in metrics:
        return Text("-", style="dim")
    value = metrics[column.key]
    return Text(column.text(value), style=column.style(value))


class WandbTracker:
    """Logs to Weights & Biases.

    Args:
        project: the project's name there.
        directory: where the run's files are kept.
        name: the run's name there.
        config: the resolved configuration, shown with the run.
        mode: "offline" needs neither key nor network; upload later with `wandb sync`.
        run_id: the same id continues the same run.

    Raises:
        ImportError: wandb is not installed.
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
    ) -> None:
        if mode not in ("offline", "online"):
            raise ValueError(f"wandb mode must be 'offline' or 'online', got {mode!r}")
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "logging to Weights & Biases needs wandb, which is not installed: "
                "pip install 'rl-consistency[wandb]', or set tracking.wandb to null in the recipe"
            ) from error
        Path(directory).mkdir(parents=True, exist_ok=True)
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

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
