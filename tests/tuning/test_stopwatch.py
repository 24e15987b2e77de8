"""Rounds alternate between contestants, each round another one first."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from triton.runtime.errors import PTXASError

from rl_consistency.tuning import stopwatch
from rl_consistency.tuning.stopwatch import COPIES_LIMIT, ColdDevice, interleaved


def test_every_round_times_all_and_another_one_first():
    order = []

    def timer(name):
        def sample(i):
            order.append((name, i))
            return float(i)

        return sample

    samples = interleaved({n: timer(n) for n in "abc"}, seconds=0.0, least=4, most=9)
    assert samples == {n: [0.0, 1.0, 2.0, 3.0] for n in "abc"}
    assert "".join(name for name, _ in order) == "abcbcacababc"


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 2), (1e9, 5)])
def test_rounds_stay_within_their_bounds(seconds, rounds):
    samples = interleaved({"a": lambda i: 1.0}, seconds=seconds, least=2, most=5)
    assert len(samples["a"]) == rounds


@pytest.mark.parametrize(
    ("operand_bytes", "copies"), [(1, COPIES_LIMIT), (50, 2), (30, 4), (100, 1), (10**9, 1)]
)
def test_copies_exceed_the_cache_twice_over(operand_bytes, copies):
    device = ColdDevice.__new__(ColdDevice)
    device.device, device.cache_bytes = torch.device("cpu"), 50
    assert device.copies(operand_bytes) == copies


def test_what_does_not_compile_ahead_is_left_to_the_call_and_other_errors_are_not(monkeypatch):
    bench = ColdDevice.__new__(ColdDevice)
    for error, passes in ((PTXASError("died"), True), (RuntimeError("CUDA error"), False)):
        monkeypatch.setattr(stopwatch, "compile_ahead", Mock(side_effect=error))
        if passes:
            bench.prepare([])
        else:
            with pytest.raises(RuntimeError, match="CUDA error"):
                bench.prepare([])


class FakeGraph:
    """Counts captures that are open, and replays."""

    def __init__(self):
        self.pool, self.open, self.replays = None, False, 0

    def capture_begin(self, pool, mode):
        assert mode == "thread_local" and not self.open
        self.pool, self.open = pool, True

    def capture_end(self):
        self.open = False

    def replay(self):
        assert not self.open
        self.replays += 1


@pytest.fixture
def device(monkeypatch):
    """A cold device whose graphs take 3 ms each -> (device, the graphs)."""
    graphs = []

    def graph():
        graphs.append(FakeGraph())
        return graphs[-1]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 3.0
    )
    for name, stand_in in {
        "CUDAGraph": graph,
        "Event": lambda enable_timing: event,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    cold = ColdDevice.__new__(ColdDevice)
    cold.device, cold._stream, cold._flush = torch.device("cpu"), stream, torch.ones(3)
    return cold, graphs


def test_each_name_has_a_graph_of_its_calls_and_all_share_their_memory(device):
    cold, graphs = device
    called = []
    calls = {"a": [lambda: called.append("a")] * 2, "b": [lambda: called.append("b")]}
    timers = cold.timers(calls)
    assert called == ["a"] * 5 + ["b"] * 3  # every call and the first again, then the capture
    assert len(graphs) == 2 and graphs[0].pool is graphs[1].pool is not None
    assert [timers[name](0) for name in "ab"] == pytest.approx([1.5e-3, 3e-3])
    assert [graph.replays for graph in graphs] == [1, 1] and not cold._flush.any()
    assert cold.timers(calls) and graphs[2].pool is not graphs[0].pool


def test_a_capture_ends_when_a_call_fails(device):
    cold, graphs = device

    def fails_when_captured():
        if graphs:
            raise RuntimeError("not while a graph is captured")

    with pytest.raises(RuntimeError, match="while a graph"):
        cold.timers({"a": [fails_when_captured]})
    assert not graphs[0].open
