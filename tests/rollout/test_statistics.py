"""Rates of a rollout, also of one that did nothing."""

from __future__ import annotations

from rl_consistency.rollout.statistics import RolloutStatistics


def test_rates_are_counts_over_seconds() -> None:
    statistics = RolloutStatistics(
        steps=4,
        prefill_tokens=100,
        decode_tokens=40,
        drafted_tokens=10,
        accepted_tokens=4,
        num_kv_blocks=50,
        peak_kv_blocks=20,
        seconds=2.0,
        host_seconds=1.0,
    )
    assert statistics.prefill_tokens_per_second == 50.0
    assert statistics.decode_tokens_per_second == 20.0
    assert statistics.acceptance_rate == 0.4
    assert statistics.peak_kv_share == 0.4
    assert statistics.host_seconds_per_step == 0.25


def test_nothing_done_is_no_division_by_zero() -> None:
    statistics = RolloutStatistics()
    assert statistics.prefill_tokens_per_second == statistics.decode_tokens_per_second == 0.0
    assert statistics.acceptance_rate == statistics.peak_kv_share == 0.0
    assert statistics.host_seconds_per_step == 0.0
