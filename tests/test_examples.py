"""The examples run as they are printed."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize("measure_only", [False, True])
def test_in_the_trl_example_tokens_differ_only_without_the_patch(measure_only, monkeypatch, capsys):
    pytest.importorskip("trl", reason="trl is an optional extra")
    options = ["--measure-only"] if measure_only else []
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", "--steps", "2", *options])
    runpy.run_path(str(EXAMPLES / "trl_grpo.py"), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(r"(\d+) of (\d+) tokens differ", last)
    assert found and int(found[2]) > 100
    assert (int(found[1]) > 0) == measure_only


def test_one_line_is_all_that_a_script_of_trl_needs():
    code = (EXAMPLES / "trl_grpo.py").read_text("utf-8").partition("def main")[2]
    assert code.count("rl_consistency.") == 1 and "rl_consistency.attach(trainer" in code
