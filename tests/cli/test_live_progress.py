"""The phases of a start: a line that changes on a terminal, plain lines elsewhere."""

import io
from time import sleep

import pytest
from rich.console import Console

from rl_consistency.cli.console import start_up
from rl_consistency.cli.main import main

PHASES = ("reading [the] data", "loading the weights")


def shown(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with start_up(console) as starting:
        for phase in PHASES:
            starting(phase)
            sleep(0.2 if terminal else 0)  # two frames
        console.print("a warning")
        starting("")
        console.print("the first step")
    return out.getvalue()


def test_a_pipe_gets_one_plain_line_a_phase():
    assert shown(False).splitlines() == [*PHASES, "a warning", "the first step"]


def test_a_terminal_shows_one_line_that_goes_before_the_first_step():
    before, _, after = shown(True).partition("a warning")
    assert PHASES[0] in before and PHASES[1] in before
    assert "\n" not in before
    assert after.endswith("the first step\n") and PHASES[1] not in after.partition("the first")[2]


def test_the_line_goes_with_an_error():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with pytest.raises(ValueError, match="no such model"), start_up(console) as starting:
        starting("loading")
        raise ValueError("no such model")
    assert out.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back


def test_the_command_tells_the_phases(tmp_path, capsys):
    arguments = ["--dry-run", "--set", f"run.output_dir={tmp_path / 'run'}"]
    assert main(["train", "grpo_arithmetic_tiny_cpu", *arguments]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["building the policy", "reading the data"]
    assert told.count("taking a small step") == 1
