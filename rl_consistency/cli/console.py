"""What commands print while they work, and the table of the negative controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rl_consistency.verify.claims import Result
    from rl_consistency.verify.mutants.run import MutantResult


def live_progress(console: Console) -> Progress:
    """What is done, of how much, since when; it goes when its block ends."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)


def compact_table(title: str) -> Table:
    """A table without lines: 80 columns hold more of it."""
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")


def print_whole(console: Console, table: Table) -> None:
    """Print a table, in a log or a pipe as wide as it needs: no word of it is cut."""
    if not console.is_terminal:
        unbounded = console.options.update(max_width=10_000)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)


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


def report_mutants(
    console: Console, found: Sequence[MutantResult], controls: Sequence[Result], seconds: float
) -> tuple[bool, dict[str, Any]]:
    """Print them; returns whether all is as it has to be, and the data.

    `controls` are the same checks of the program as it is.
    """
    table, rows = Table(title="Negative controls: every check named must turn red"), []
    for name in ("mutant", "what is wrong", "caught by", "result"):
        table.add_column(name, overflow="fold", no_wrap=name == "result")
    for m in found:
        checks = "\n".join(
            f"[red]{r.key}: survived[/]" if r.passed else f"{r.key} ({r.mismatches} of {r.cases})"
            for r in m.results
        )
        verdict = "[green]caught[/]" if m.killed else "[red]SURVIVED[/]"
        table.add_row(m.mutant.name, m.mutant.what, checks, verdict)
        row = {"name": m.mutant.name, "what": m.mutant.what, "killed": m.killed}
        results = [asdict(r) for r in m.results]
        rows.append({**row, "survived_checks": list(m.survivors), "results": results})
    console.print(table)
    red = [r for r in controls if not r.passed]
    for r in red:
        console.print(f"[red]red without a mutant[/] {r.key}: {escape(r.detail)}", highlight=False)
    caught = sum(m.killed for m in found)
    checks = len({r.key for r in controls})
    text = f"{caught} of {len(found)} mutants caught, {checks} checks green without: "
    text += f"{'no' if red else 'yes'}, {seconds:.0f} s"
    console.print(text, highlight=False)
    passed = not red and caught == len(found)
    return passed, {"mutants": rows, "controls": [asdict(r) for r in controls]}
