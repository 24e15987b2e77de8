"""The bench of the first token, on a CPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.rollout.cold_start import cold_start, process
from benchmarks.rollout.workload import Workload


def test_a_new_process_has_a_first_token(tmp_path):
    figures = process("tiny-qwen3", Workload.equal(1, 2, 12, 4), tmp_path, torch.device("cpu"))
    assert 0 < figures["first_token_seconds"] < figures["process_seconds"]


def test_the_second_process_finds_what_the_first_left(monkeypatch):
    folders = []

    def noted(name, workload, caches, device):
        folders.append(caches)
        return {"first_token_seconds": 3.0 - len(folders)}

    monkeypatch.setattr("benchmarks.rollout.cold_start.process", noted)
    machine = SimpleNamespace(device=torch.device("cpu"))
    found = cold_start("tiny-qwen3", Workload.equal(1, 2, 12, 4), machine)
    assert folders[0] == folders[1] and found["ours_us"] == 2e6
    seconds = {"cold/first_token_seconds": 2.0, "warm/first_token_seconds": 1.0}
    assert found["figures"] == seconds


def test_a_process_that_fails_says_why(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"no model '$3'\" >&2\nexit 3\n", encoding="ascii")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="cold_start none 1 1 4 2 .*failed:\n*no model 'none'"):
        process("none", Workload.equal(1, 1, 4, 2), tmp_path, torch.device("cpu"))
