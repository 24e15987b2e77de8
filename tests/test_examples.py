"""The examples run as they are printed."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_the_trl_example_ends_with_no_differing_token(monkeypatch, capsys):
    pytest.importorskip("trl", reason="trl is an optional extra")
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", "--steps", "2"])
    runpy.run_path(str(EXAMPLES / "trl_grpo.py"), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(r"0 of (\d+) tokens differ", last)
    assert found and int(found[1]) > 100


def test_one_line_is_all_that_a_script_of_trl_needs():
    code = (EXAMPLES / "trl_grpo.py").read_text("utf-8").partition("def main")[2]
    assert code.count("rl_consistency.") == 1 and "rl_consistency.attach(trainer)" in code
