"""The figures of bars, from rows."""

import pytest

from benchmarks.bars import BARS
from tests.benchmarks.made_rows import bar, row


def test_geometric_mean_and_lowest_run_over_forward_and_dx_together():
    rows = [row(ratio=2.0), row(ratio=0.5), row("matmul_dx", ratio=1.0)]
    geomean = bar("matmul_geomean", rows)
    assert geomean["figure"] == pytest.approx(1.0)
    assert geomean["met"] == (geomean["figure"] >= 1.0)
    lowest = bar("matmul_lowest", rows)
    assert (lowest["figure"], lowest["met"]) == (0.5, False)
    assert bar("matmul_lowest", [row(ratio=0.93), row("matmul_dx", ratio=3.0)])["met"]


def test_random_shapes_and_the_models_have_bars_of_their_own():
    size = {"shape": {"model": "-", "sequences": 16, "length": 1024}}
    rows = [row("training_step", 1.2, **size)]
    rows.append(row("training_step_random", 1.1, peers={"liger": 10.5}, **size))
    assert bar("training_step_stock", rows)["met"]
    assert bar("training_step_random_stock", rows)["figure"] == 1.1
    assert bar("training_step_random_liger", rows)["figure"] == pytest.approx(1.05)
    named = bar("training_step_named_stock", rows)
    assert (named["figure"], named["reached"], named["met"]) == (1.2, True, False)


def test_steps_that_stock_cannot_hold_are_left_out_and_other_reasons_are_not():
    size = {"shape": {"model": "-", "sequences": 1, "length": 32768}}
    short = row("training_step_named", 1.2, **size)
    large = row("training_step_named", None, unavailable={"sdpa": "OutOfMemoryError: x"}, **size)
    other = row("training_step_named", None, unavailable={"sdpa": "RuntimeError: x"}, **size)
    assert bar("training_step_named_stock", [short, large])["figure"] == 1.2
    assert bar("training_step_named_stock", [short, other])["figure"] is None
    assert bar("training_step_named_stock", [large])["figure"] is None


def test_steps_that_liger_cannot_hold_are_left_out_too():
    size = {"shape": {"model": "-", "sequences": 1, "length": 32768}}
    peaks = {"ours": 90, "liger, fp32 gradients": 100}
    fits = row("training_step_named", 1.2, peers={"liger": 11.0}, peak_bytes=peaks, **size)
    full = {"sdpa": "OutOfMemoryError: x", "liger": "OutOfMemoryError: y"}
    large = row("training_step_named", None, ours_us=10.0, unavailable=full, **size)
    other = {"liger": "RuntimeError: y"}
    other = row("training_step_named", None, ours_us=10.0, unavailable=other, **size)
    for name, figure in (("training_step_named_liger", 1.1), ("training_step_memory", 0.9)):
        assert bar(name, [fits, large])["figure"] == pytest.approx(figure)
        assert bar(name, [fits, other])["figure"] is None
        assert bar(name, [large])["figure"] is None


def test_idle_time_and_memory_of_training_steps():
    def step(sequences, length, idle, ours):
        return row(
            "training_step_named",
            shape={"model": "-", "sequences": sequences, "length": length},
            figures={"idle_share": idle},
            peak_bytes={"ours": ours, "liger, fp32 gradients": 100},
        )

    rows = [step(16, 1024, 0.04, 101), step(8, 2048, 0.02, 106), step(1, 32768, 0.3, 90)]
    assert bar("training_step_idle", rows)["figure"] == 0.04
    assert bar("training_step_memory", rows)["figure"] == 1.06
    assert not bar("training_step_idle", [*rows, step(16, 1024, 0.06, 90)])["met"]


def test_one_slow_row_misses_an_attention_bar():
    rows = [row("attention_backward", r) for r in (1.4, 0.79)]
    assert bar("attention_backward", rows)["met"] is False
    assert bar("attention_backward", rows[:1])["met"] is True
    assert bar("attention_forward", rows)["figure"] is None


def test_faster_than_means_more_than_equal():
    assert bar("elementwise_eager", [row("elementwise", 1.0)])["met"] is False
    assert bar("elementwise_eager", [row("elementwise", 1.001)])["met"] is True
    assert bar("attention_decode", [row("attention_decode", 1.0)])["met"] is True


def test_the_bandwidth_bar_judges_large_shapes_only():
    small = row("elementwise", shape={"tokens": 8192, "width": 1024}, ceiling_fraction=0.3)
    large = row("elementwise", shape={"tokens": 8192, "width": 4096}, ceiling_fraction=0.86)
    assert bar("elementwise_bandwidth", [small, large])["figure"] == 0.86
    assert bar("elementwise_bandwidth", [small])["figure"] is None


def test_a_peer_bar_needs_the_peer_in_every_row():
    beside = row("token_logprobs", 1.5, peers={"liger": 12.0}, peak_bytes={"ours": 9, "liger": 10})
    alone = row("token_logprobs", 1.5, peak_bytes={"ours": 9})
    assert bar("token_logprobs_liger", [beside])["figure"] == pytest.approx(1.2)
    assert bar("token_logprobs_liger", [beside])["met"]
    assert bar("token_logprobs_memory", [beside])["figure"] == pytest.approx(0.9)
    for name in ("token_logprobs_liger", "token_logprobs_memory"):
        assert bar(name, [beside, alone])["figure"] is None
        assert bar(name, [beside, alone])["met"] is False


def test_gradients_of_experts_are_judged_by_long_sequences():
    def gradient(length, ratio):
        return row("experts_gradient", ratio, shape={"length": length})

    rows = [gradient(256, 0.2), gradient(1024, 0.9), gradient(4096, 1.6)]
    assert bar("experts_gradient", rows)["figure"] == pytest.approx(1.2)
    assert bar("experts_gradient", rows[:1])["figure"] is None


def rollout(suite, **fields):
    return row(suite, None, shape={"model": "qwen3-0.6b"}, **fields)


def test_decode_is_judged_by_the_slowest_shape_and_needs_all_three():
    names = BARS["rollout_decode"].suites
    rows = [row(name, ratio) for name, ratio in zip(names, (1.1, 0.96, 1.0), strict=True)]
    assert bar("rollout_decode", rows)["figure"] == 0.96
    assert not bar("rollout_decode", rows)["met"]
    assert not bar("rollout_decode", rows[:1], **{names[1]: False})["met"]


def test_rollout_bars_read_their_figures():
    roofline = [rollout("rollout_roofline", ceiling_fraction=f) for f in (0.7, 0.66)]
    elsewhere = rollout(BARS["rollout_decode"].suites[0], ceiling_fraction=0.6)
    assert bar("rollout_roofline", [*roofline, elsewhere])["figure"] == 0.66
    idle = [rollout("rollout_idle", figures={"idle_share": f}) for f in (0.01, 0.05)]
    assert bar("rollout_idle", idle[:1])["met"] and not bar("rollout_idle", idle)["met"]


def test_no_mismatch_counts_only_beside_a_stock_that_drifts():
    def drift(strict, stock):
        figures = {"strict/mismatched_tokens": strict, "stock/mismatched_tokens": stock}
        return bar("rollout_grpo_drift", [rollout("rollout_grpo_step", figures=figures)])["met"]

    assert drift(0, 7) and not drift(1, 7)
    assert not drift(0, 0), "a check that stock passes shows nothing"
    alone = rollout("rollout_grpo_step", figures={"strict/mismatched_tokens": 0})
    assert bar("rollout_grpo_drift", [alone])["figure"] is None
