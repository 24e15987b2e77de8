"""Works of plain functions, and a bench on which a call takes as long as it says."""

from __future__ import annotations

import pytest
import torch

from rl_consistency.cases.launches import Launch
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings
from rl_consistency.kernels.matmul import audit
from rl_consistency.tuning import tune as tuning


class Candidate:
    """Adds `added` in place, and takes `seconds`; a list gives one time per sample, in turn."""

    def __init__(self, seconds, added=1.0):
        self.seconds = [seconds] if isinstance(seconds, float) else seconds
        self.added, self.calls, self.samples = added, 0, 0

    def __call__(self, x):
        self.calls += 1
        return x.add_(self.added)

    def sample(self):
        self.samples += 1
        return self.seconds[(self.samples - 1) % len(self.seconds)]


class FakeBench:
    """Has no device."""

    def __init__(self, free=1e12):
        self.free, self.prepared = free, []

    def copies(self, operand_bytes):
        return 2

    def free_bytes(self):
        return self.free

    def prepare(self, calls):
        self.prepared.append(len(calls))

    def timers(self, calls):
        assert all(len(own) == 2 for own in calls.values())
        return {name: self.timer(own[0].func) for name, own in calls.items()}

    def timer(self, candidate):
        return lambda i: candidate.sample()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few rounds; winners and the audit as in a new process."""
    monkeypatch.setattr(tuning, "FINAL_ROUNDS", (7, 7))
    monkeypatch.setattr(findings_module, "_by_device", {})
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    findings_module.forget_picks()
    yield
    findings_module.forget_picks()


@pytest.fixture
def bench():
    return FakeBench()


@pytest.fixture
def store(tmp_path):
    return Findings(tmp_path / "tuned" / "file.json", {"device": "one"})


@pytest.fixture
def candidate():
    return Candidate


@pytest.fixture
def make_bench():
    return FakeBench


@pytest.fixture
def make_work():
    """A work of candidates; the first is the op's own choice."""

    def make(candidates, **changes):
        fields = {
            "op": "add",
            "shape": {"n": 8},
            "operands": lambda: (torch.arange(8.0),),
            "candidates": candidates,
            "picked": next(iter(candidates)),
            "entry": "add/n8/m1",
        }
        return Launch(**fields | changes)

    return make
