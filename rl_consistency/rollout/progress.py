"""A progress bar for `RolloutEngine.generate` and `stream`, and a line while kernels compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ProgressCallback = Callable[[int, int, int], None]
"""Called after each step with (tokens generated, samples finished, samples in all)."""

RolloutProgress = ProgressCallback | AbstractContextManager[ProgressCallback]
"""What `generate` takes; a block is entered for the rollout."""


@contextmanager
def progress_bar(
    title: str = "rollout", *, console: Console | None = None
) -> Iterator[ProgressCallback]:
    """A bar of finished samples with the tokens per second beside it.

        engine.generate(prompts, sampling, progress=progress_bar())

    It is drawn on `console`, standard error by default, if that is a terminal. A `with` block keeps
    one bar for several rollouts.
    """
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[speed]}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, tokens=0, speed="0")

        def progress(num_tokens: int, num_finished: int, num_samples: int) -> None:
            elapsed = bar.tasks[0].elapsed
            speed = shown_rate(num_tokens / elapsed if elapsed else 0.0)
            rates = {"tokens": num_tokens, "speed": speed}
            bar.update(task, completed=num_finished, total=num_samples, **rates)

        yield progress


def shown_rate(rate: float) -> str:
    """Tokens a second as people read them: 12,346, 9.5 or 0.043."""
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.2g}"


MOMENT = 2.0
"""Seconds for which compiling is silent. Kernels that are on disk are there sooner."""

CompileReport = Callable[[int, int], None]
"""Called after each kernel with (kernels compiled, kernels in all)."""


@contextmanager
def compile_line(
    *, quiet: bool = False, console: Console | None = None, after: float = MOMENT
) -> Iterator[CompileReport]:
    """A line on `console`, standard error by default, once kernels compile for `after` seconds, and
    one at the end. A terminal shows how far it is, too."""
    console = console or Console(stderr=True, quiet=quiet)
    started, shown, status = monotonic(), 0, console.status("rollout: compiling kernels")

    def report(done: int, total: int) -> None:
        nonlocal shown
        if monotonic() - started < after:
            return
        if not shown:
            console.print(f"rollout: compiling {total} kernels, once for this device", style="dim")
            status.start()
        shown = total
        status.update(f"rollout: compiling kernels, {done} of {total}")

    try:
        yield report
    finally:
        status.stop()
    if shown:
        text = f"rollout: {shown} kernels compiled in {monotonic() - started:.0f} s"
        console.print(text, style="dim")
