"""The case runs on a CPU with a tiny model; what it measures needs a GPU."""

import pytest

from benchmarks.trl import grpo
from benchmarks.trl.grpo import trl_grpo
from benchmarks.trl.learning import reward_of
from tests.benchmarks.test_rollout_cases import MACHINE, TINY, row


def test_an_attached_trl_step_has_no_drift_and_stock_has(monkeypatch):
    for name, count in (("STEPS", 4), ("WARM_UP", 1), ("FEW", 1), ("CHECK_EVERY", 2)):
        monkeypatch.setattr(grpo, name, count)
    sizes = {"sequences": 4, "group": 2, "prompt": 8, "new_tokens": 8, "micro_batch": 2}
    found = row(trl_grpo(MACHINE, TINY, **sizes))
    figures = found.figures
    assert figures["strict/mismatched_tokens"] == 0 < figures["stock/mismatched_tokens"]
    assert figures["strict/tokens"] <= 4 * 4 * 8 and figures["stock/tokens"] <= 4 * 8
    assert found.ratio == pytest.approx(found.stock_us / found.ours_us)
    assert 0 < figures["strict/training_seconds"] < found.ours_us / 1e6
    assert 0 < figures["monitor_share"] < 1
    assert figures["gradient_check_share"] > 0
    assert figures["times_own_recipe"] == pytest.approx(found.ours_us / found.peers["own recipe"])


def test_the_reward_of_a_run_is_that_of_its_last_steps():
    assert 0 <= reward_of(1, attached=True, steps=2, last=1) <= 1
