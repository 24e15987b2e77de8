"""The live table of a run on the console."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.run_directory.step_files import Metrics


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
