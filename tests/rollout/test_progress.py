"""The progress bar draws on a terminal and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rl_consistency.rollout.progress import progress_bar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_samples_and_tokens_on_a_terminal_only(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    with progress_bar("sampling", console=console) as progress:
        progress(1234, 1, 4)
        progress(2500, 4, 4)
    shown = text.getvalue()
    for part in ("sampling", "4/4", "2,500 tokens"):
        assert (part in shown) == terminal
