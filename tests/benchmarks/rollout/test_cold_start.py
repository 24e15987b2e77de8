"""The bench of the first token: two fresh processes on a CPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.rollout.cold_start import cold_start, process
from benchmarks.rollout.workload import Workload


def test_both_processes_have_a_first_token():
    machine = SimpleNamespace(device=torch.device("cpu"))
    found = cold_start("tiny-qwen3", Workload.equal(1, 2, 12, 4), machine)
    figures = found["figures"]
    for state in ("cold", "warm"):
        assert 0 < figures[f"{state}/first_token_seconds"] < figures[f"{state}/process_seconds"]
    assert found["ours_us"] == 1e6 * figures["cold/first_token_seconds"]


def test_a_process_that_fails_says_why(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"no model '$3'\" >&2\nexit 3\n", encoding="ascii")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="cold_start none 1 1 4 2 .*failed:\n*no model 'none'"):
        process("none", Workload.equal(1, 1, 4, 2), tmp_path, torch.device("cpu"))
