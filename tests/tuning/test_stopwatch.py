"""Rounds alternate between contestants, each round another one first."""

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
