"""The progress bar draws on a terminal and nowhere else."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager

import pytest
from rich.console import Console

from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.progress import ProgressCallback, compile_line, progress_bar
from rl_consistency.rollout.sampling_params import SamplingParams


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_samples_and_tokens_on_a_terminal_only(terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    with progress_bar("sampling", console=console) as progress:
        progress(1234, 1, 4)
        progress(2500, 4, 4)
    shown = text.getvalue()
    for part in ("sampling", "4/4", "2,500 tokens"):
        assert (part in shown) == terminal


class Counting(AbstractContextManager[ProgressCallback]):
    """An engine's callback and block: notes what is called."""

    def __init__(self):
        self.events: list[str] = []

    def __enter__(self):
        self.events.append("enter")
        return lambda *counts: self.events.append("step")

    def __exit__(self, *exception):
        self.events.append("exit")


def test_a_block_is_left_when_the_rollout_ends_or_fails(tiny_qwen3):
    with patch(model := tiny_qwen3()):
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=8)
        whole, left = Counting(), Counting()
        engine.generate([[1]], SamplingParams(max_tokens=3), progress=whole)
        stream = engine.stream([[1]], SamplingParams(max_tokens=3, n=2), progress=left)
        next(stream)
        stream.close()
        assert not engine.has_unfinished
    assert whole.events[0] == "enter" and whole.events[-1] == "exit" and "step" in whole.events
    assert left.events[0] == "enter" and left.events[-1] == "exit"


def compiled_with(terminal, after, quiet=False):
    """What a console shows of three kernels."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=80, quiet=quiet)
    with compile_line(console=console, after=after) as report:
        for done in (1, 2, 3):
            report(done, 3)
    return text.getvalue()


def test_kernels_that_are_there_in_a_moment_show_no_line():
    assert compiled_with(False, 60.0) == "" == compiled_with(True, 60.0)


def test_kernels_that_take_long_show_a_line_and_how_long():
    lines = compiled_with(False, 0.0).splitlines()
    assert lines[0] == "rollout: compiling 3 kernels, once for this device"
    assert lines[-1].startswith("rollout: 3 kernels compiled in 0 s") and len(lines) == 2
    assert "compiling kernels" in compiled_with(True, 0.0)
    assert compiled_with(False, 0.0, quiet=True) == ""
