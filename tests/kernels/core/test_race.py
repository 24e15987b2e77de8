"""The clock of a race; tests/gpu/kernels/test_matmul_cuda.py runs one."""

from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels.core import race
from rl_consistency.kernels.core.race import ROUNDS, time_ratio


@pytest.fixture
def clock(monkeypatch):
    """A device on which work takes what it says, and the first run of each ten times as long."""
    now = SimpleNamespace(ms=0.0, runs=[])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = now.ms

        def elapsed_time(self, end):
            return end.ms - self.ms

        def synchronize(self):
            pass

    def work(name, ms):
        def run():
            now.ms += ms * (1 if name in now.runs else 10)
            now.runs.append(name)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return SimpleNamespace(work=work, runs=now.runs)


def test_a_ratio_leaves_out_the_first_run_of_each_and_takes_turns(clock):
    assert time_ratio(clock.work("a", 3.0), clock.work("b", 2.0)) == pytest.approx(1.5)
    assert clock.runs == ["a", "b"] * (ROUNDS + 1)


def test_a_race_is_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a captured CUDA graph cannot; run it before"):
        race.time_ratio(lambda: None, lambda: None)
