"""The cases run on a CPU, two processes over gloo; what they measure needs GPUs."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.distributed import grpo, step
from benchmarks.distributed.grpo import grpo_scaling
from benchmarks.distributed.ordered_sum import sum_round
from benchmarks.distributed.step import optimizer_step
from tests.benchmarks.test_rollout_cases import MACHINE, TINY, row
from tests.ranks import run_ranks

__all__ = ["run_ranks"]


def test_a_step_has_both_times_and_what_the_carry_takes(run_ranks, monkeypatch):
    monkeypatch.setattr(step, "on_ranks", lambda bench, *given: run_ranks(*given)[0])
    monkeypatch.setattr(step, "ROUNDS", 2)  # which ranks inherit: they are forked
    found = row(optimizer_step(MACHINE, 2, TINY, "fsdp2", sequences=2, length=16))
    assert found.ratio == pytest.approx(found.stock_us / found.ours_us)
    assert found.figures["times_stock"] == pytest.approx(1 / found.ratio)
    assert found.tokens_per_second["ours"] == pytest.approx(2 * 2 * 16 / found.ours_us * 1e6)
    assert found.figures["carry_bytes"] > 0


def test_a_whole_step_of_several_ranks_is_set_against_that_of_one(run_ranks, monkeypatch):
    def on_ranks(bench, count, function, *given):
        return run_ranks(count, function, *given)[0]

    monkeypatch.setattr(grpo, "on_ranks", on_ranks)
    monkeypatch.setattr(grpo, "STEPS", 3)
    found = row(grpo_scaling(MACHINE, 2, TINY, "fsdp2", groups=1, group=2, new_tokens=4))
    rates = found.tokens_per_second
    assert found.figures["scaling"] == pytest.approx(rates["on 2"] / rates["on 1"])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="this takes 2 GPUs; here are 1"):
        sum_round(SimpleNamespace(device=torch.device("cuda")), 2, 1)
