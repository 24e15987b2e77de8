"""Rounds alternate between contestants, each round another one first."""

import pytest
import torch

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
