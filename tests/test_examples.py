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


@pytest.mark.thorough
@pytest.mark.parametrize("stock", [False, True], ids=["attached", "stock"])
@pytest.mark.parametrize("name", ["trl_sft.py", "hf_trainer.py"])
def test_every_cut_of_a_batch_has_one_digest_only_with_the_patch(name, stock, monkeypatch, capsys):
    pytest.importorskip("trl", reason="trl is an optional extra")
    monkeypatch.setattr(sys, "argv", [name, "--stock"] if stock else [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(r"digests of 4 cuts: (\d)", last)
    assert found and (int(found[1]) > 1) == stock


@pytest.mark.parametrize("name", ["trl_grpo.py", "trl_sft.py", "hf_trainer.py"])
def test_one_line_is_all_that_a_script_needs(name):
    code = (EXAMPLES / name).read_text("utf-8").partition("\ndef ")[2]
    assert code.count("rl_consistency.attach(trainer") == 1
    others = {"rl_consistency.model_digest"} if "digest_after" in code else set()
    assert set(re.findall(r"rl_consistency\.\w+", code)) == {"rl_consistency.attach"} | others
