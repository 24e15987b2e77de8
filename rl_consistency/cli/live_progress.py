"""The bar under which a command works."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def live_progress(console: Console) -> Progress:
    """What is done, of how much, since when; it goes when its block ends."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
