"""The bench of `tune` reads what the command prints, and fails with what it says."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks.tune import policy
from benchmarks.tune.policy import SUMMARY, tune_policy
from rl_consistency.cli.tune import show
from rl_consistency.tuning.tune import TuningReport


def test_the_summary_of_the_command_is_read():
    text = io.StringIO()
    show(Console(file=text, width=400), TuningReport(left_out={"work": "no time"}), [None] * 3)
    assert SUMMARY.search(text.getvalue()).groups() == ("0", "3", "0")


def test_a_command_that_fails_is_an_error_with_its_message(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append((command, sorted(Path(command[command.index("--model") + 1]).iterdir())))
        return SimpleNamespace(returncode=2, stdout="", stderr="error: nothing to tune")

    monkeypatch.setattr(policy.subprocess, "run", run)
    bench = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"ended with 2:\s*error: nothing to tune"):
        tune_policy(bench, "tiny-qwen3")
    ((command, files),) = asked
    assert "tune" in command and command[-2:] == ["--device", "cpu"]
    assert [file.name for file in files] == ["config.json"]
