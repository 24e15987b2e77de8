"""The line under which a command works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


def live_progress(console: Console) -> Progress:
    """What is done, of how much, since when; it goes when its block ends."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)


@contextmanager
def start_up(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows the phase it is given: in one line on a terminal, until "", elsewhere in one each."""
    status = console.status("")

    def tell(phase: str) -> None:
        if not phase:
            status.stop()
        elif console.is_terminal:
            status.update(Text(phase))
            status.start()
        else:
            console.print(phase, markup=False, highlight=False, soft_wrap=True)

    try:
        yield tell
    finally:
        status.stop()
