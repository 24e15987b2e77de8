"""Benchmark results: rows, bars, and the file they are merged into."""

import json
import math
from dataclasses import asdict

import pytest

from benchmarks.bars import BARS
from benchmarks.results import Results, compare, load, save
from benchmarks.rows import Row, geometric_mean
from benchmarks.shapes import NAMED

META = {"device": "Test GPU", "commit": "abc", "versions": {"torch": "2.11", "triton": "3.6"}}
RECORD = {"complete": True, "commit": "abc"}


def row(suite="matmul_forward", ratio=1.0, **fields):
    fields = {"work": suite, "shape": {"tokens": 8192, "width": 4096}, "dtype": "bfloat16"} | fields
    times = {"ours_us": 10.0, "stock_us": 10.0 * ratio, "ratio": ratio} if ratio else {}
    return Row(**{"suite": suite} | times | fields)


def bar(name, rows, **complete):
    suites = {suite: True for suite in BARS[name].suites} | complete
    records = {suite: {"complete": whole} for suite, whole in suites.items()}
    return Results(tuple(rows), {"suites": records}).bars[name]


def test_geometric_mean_and_lowest_run_over_forward_and_dx_together():
    rows = [row(ratio=2.0), row(ratio=0.5), row("matmul_dx", ratio=1.0)]
    geomean = bar("matmul_geomean", rows)
    assert geomean["figure"] == pytest.approx(1.0)
    assert geomean["met"] == (geomean["figure"] >= 1.0)
    lowest = bar("matmul_lowest", rows)
    assert (lowest["figure"], lowest["met"]) == (0.5, False)
    assert bar("matmul_lowest", [row(ratio=0.93), row("matmul_dx", ratio=3.0)])["met"]


def test_random_products_are_judged_by_bands_of_their_rows():
    def product(m, ratio, seed=1):
        return row("matmul_random", ratio, shape={"seed": seed, "m": m, "n": 8, "k": 8})

    rows = [product(1, 2.0), product(16, 0.9, 2), product(17, 0.84), product(128, 1.1, 2)]
    assert bar("matmul_random_1_geomean", rows)["figure"] == pytest.approx(1.8**0.5)
    assert bar("matmul_random_1_lowest", rows)["met"]
    slow = bar("matmul_random_17_lowest", rows)
    assert (slow["figure"], slow["met"]) == (0.84, False)
    assert not bar("matmul_random_17_geomean", rows)["met"]
    assert bar("matmul_random_129_geomean", rows)["figure"] is None
    assert not bar("matmul_random_1025_lowest", rows)["met"]


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


def test_idle_steps_of_few_sequences_do_not_count():
    def step(sequences, idle):
        shape, figures = {"sequences": sequences}, {"idle_share": idle}
        return row("rollout_roofline_sparse", None, shape=shape, figures=figures)

    rows = [step(8, 0.4), step(32, 0.05), step(256, 0.01)]
    found = bar("rollout_idle_sparse", rows)
    assert (found["figure"], found["reached"]) == (0.05, True)
    assert not bar("rollout_idle_sparse", [*rows, step(64, 0.06)])["reached"]


def test_liger_is_asked_only_for_the_families_it_has():
    def step(**fields):
        return row("training_step_sparse", 1.2, **fields)

    without, beside = step(), step(peers={"liger": 11.0})
    refused = step(unavailable={"liger": "TypeError: experts are not iterable"})
    name = "training_step_sparse_liger"
    assert bar(name, [without, beside])["figure"] == pytest.approx(1.1)
    assert bar(name, [without])["figure"] is None
    assert bar(name, [beside, refused])["figure"] is None


def test_an_upper_bar_is_missed_above_and_by_a_figure_that_is_not_finite():
    assert bar("accuracy", [row("accuracy", None, error_ratio=1.04)])["met"]
    assert not bar("accuracy", [row("accuracy", None, error_ratio=1.06)])["met"]
    assert not bar("accuracy", [row("accuracy", None, error_ratio=float("inf"))])["met"]
    assert not bar("accuracy", [row("accuracy", None, error_ratio=float("nan"))])["met"]


@pytest.mark.parametrize("ratios", [(math.nan, 2.0), (2.0, math.nan)])
def test_a_nan_hides_behind_no_other_row(ratios):
    """Whatever the order: `min` and `max` pass over it in one of both."""
    rows = [row("attention_forward", ratio) for ratio in ratios]
    assert math.isnan(bar("attention_forward", rows)["figure"])
    rows = [row("accuracy", error_ratio=ratio) for ratio in ratios]
    assert not bar("accuracy", rows)["met"]
    assert not bar("gradient_fold_geomean", [row("gradient_fold", r) for r in ratios])["met"]


def test_a_mean_needs_the_ratio_of_every_row():
    rows = [row("gradient_fold", ratio) for ratio in (2.0, None)]
    assert bar("gradient_fold_geomean", rows)["figure"] is None


def test_each_band_of_random_products_needs_two_seeds_of_its_own():
    rows = [
        row("matmul_random", 2.0, shape={"seed": seed, "m": m, "n": 64, "k": 64})
        for seed, m in ((1, 1), (2, 5000))
    ]
    assert not bar("matmul_random_1_lowest", rows)["met"]
    rows.append(row("matmul_random", 2.0, shape={"seed": "1", "m": 2, "n": 64, "k": 64}))
    assert not bar("matmul_random_1_lowest", rows)["met"]
    rows.append(row("matmul_random", 2.0, shape={"seed": 3, "m": 2, "n": 64, "k": 64}))
    assert bar("matmul_random_1_lowest", rows)["met"]


def test_an_incomplete_suite_meets_no_bar():
    found = bar("gradient_fold_geomean", [row("gradient_fold", 2.0)], gradient_fold=False)
    assert (found["figure"], found["complete"], found["met"]) == (2.0, False, False)
    one_half = bar("matmul_lowest", [row(ratio=2.0)], matmul_dx=False)
    assert one_half["met"] is False
    absent = Results((row(ratio=2.0),), {"suites": {"matmul_forward": {"complete": True}}})
    assert absent.bars["matmul_lowest"]["met"] is False


def test_a_bar_over_models_is_met_when_each_was_measured_at_each_size():
    name, rows = "training_step_named_liger", []
    for model in NAMED:
        for length in (1024, 2048, 32768):
            cut = f"{model}-8l" if model.endswith("8b") else model
            shape = {"model": cut, "sequences": 1, "length": length}
            rows.append(row("training_step_named", 1.2, peers={"liger": 12.0}, shape=shape))
    assert bar(name, rows)["met"]
    alone = Results(tuple(rows), {"suites": {"training_step_named": {"complete": True}}})
    assert alone.bars[name]["met"]  # no other suite is needed for what this one has
    for missing in range(len(rows)):
        found = bar(name, rows[:missing] + rows[missing + 1 :])
        assert (found["reached"], found["complete"], found["met"]) == (True, False, False)


def test_a_bar_over_random_shapes_needs_two_seeds():
    def fold(seed):
        return row("gradient_fold_random", 2.0, shape={"seed": seed, "tokens": 8})

    assert not bar("gradient_fold_random", [fold(1), fold(1)])["met"]
    assert bar("gradient_fold_random", [fold(1), fold(2)])["met"]


def test_a_part_that_was_cut_short_is_not_forgotten_when_another_was_not():
    suite, results = "gradient_fold_random", Results()

    def measured(seed, complete):
        found = [row(suite, 2.0, shape={"seed": seed})]
        return results.merged(suite, found, META, {"complete": complete}, only={"seed": [seed]})

    for seed, complete, met in ((1, False, False), (2, True, False), (1, True, True)):
        results = measured(seed, complete)
        assert results.bars["gradient_fold_random"]["met"] is met, seed


def test_an_error_in_an_earlier_part_of_a_suite_is_not_forgotten():
    failed = row("gradient_fold_random", None, shape={"seed": 1}, error="RuntimeError: x")
    fine = [row("gradient_fold_random", 2.0, shape={"seed": seed}) for seed in (1, 2)]
    assert bar("gradient_fold_random", fine)["complete"]
    assert not bar("gradient_fold_random", [failed, *fine])["complete"]


def test_an_error_row_counts_in_no_figure():
    failed = row("gradient_fold", None, error="RuntimeError: out of memory")
    assert bar("gradient_fold_geomean", [failed])["figure"] is None
    assert geometric_mean([]) is None


def test_a_run_of_some_models_leaves_rows_of_the_others():
    suite = "rollout_roofline_named"

    def of(model, fraction):
        return row(suite, shape={"model": model}, ceiling_fraction=fraction)

    results = Results().merged(suite, [of("a", 0.5), of("b", 0.6)], META, RECORD)
    only = {"model": ["b", "c"]}
    results = results.merged(suite, [of("b", 0.7), of("c", 0.8)], META, RECORD, only=only)
    assert [r.ceiling_fraction for r in results.rows] == [0.5, 0.7, 0.8]
    assert [r.ceiling_fraction for r in results.of(suite, only={"model": ["b"]})] == [0.7]
    assert results.merged(suite, [of("a", 0.1)], META, RECORD).rows == (of("a", 0.1),)


def test_a_seed_leaves_rows_of_other_seeds():
    first, second, again = (
        row("matmul_random", ratio, shape={"seed": seed, "m": 1, "n": 8, "k": 8})
        for ratio, seed in ((0.5, 1), (0.6, 2), (0.7, 1))
    )
    results = Results()
    for found in (first, second, again):
        only = {"seed": [found.shape["seed"]]}
        results = results.merged("matmul_random", [found], META, RECORD, only=only)
    assert results.rows == (second, again)


def test_a_suite_replaces_its_own_rows_and_no_others(tmp_path):
    file = tmp_path / "gpu.json"
    results = Results((), {}).merged("matmul_forward", [row(ratio=0.5)], META, RECORD)
    results = results.merged("elementwise", [row("elementwise", 3.0)], META, RECORD)
    replaced = results.merged("matmul_forward", [row(ratio=0.7), row(ratio=0.8)], META, RECORD)
    assert [r.ratio for r in replaced.rows] == [0.7, 0.8, 3.0]
    save(file, results)
    newer = META | {"commit": "def"}
    again = load(file, "Test GPU").merged(
        "matmul_forward", [row(ratio=1.5)], newer, RECORD | {"commit": "def"}
    )
    save(file, again)
    content = json.loads(file.read_text())
    assert {r["suite"]: r["ratio"] for r in content["rows"]} == {
        "matmul_forward": 1.5,
        "elementwise": 3.0,
    }
    assert content["meta"]["commit"] == "def"
    assert content["meta"]["suites"]["elementwise"]["commit"] == "abc"
    assert content["bars"]["matmul_lowest"]["figure"] == 1.5
    assert set(content["bars"]) == set(BARS)
    assert load(file).rows == again.rows
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.json"]


def test_another_device_is_refused(tmp_path):
    file = tmp_path / "gpu.json"
    assert load(file, "Test GPU") == Results((), {})
    save(file, Results((row(),), META))
    with pytest.raises(ValueError, match="holds results of 'Test GPU' and this is 'Other'"):
        load(file, "Other")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"meta": {}}',
        '{"rows": [], "meta": []}',
        '{"rows": [{"suite": "x"}], "meta": {}}',
        json.dumps({"rows": [asdict(row()) | {"speed": 3}], "meta": META}),
        json.dumps({"rows": [asdict(row()) | {"ratio": "a"}], "meta": META}),
        json.dumps({"rows": [asdict(row()) | {"shape": None}], "meta": META}),
        json.dumps({"rows": [asdict(row("experts_gradient"))], "meta": META}),
        json.dumps({"rows": [], "meta": META | {"suites": {"attention_forward": {}}}}),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_kept(tmp_path, text):
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(ValueError) as refusal:
        load(file)
    assert str(refusal.value).startswith(f"{file} is no results file of `python -m benchmarks`: ")
    assert file.read_text() == text


def test_two_files_are_compared_case_by_case():
    old = Results((row(ratio=2.0), row("elementwise", 2.0)), META)
    new = Results((row(ratio=2.0, ours_us=11.0), row("token_logprobs", 2.0)), META)
    (line,) = (text for text in compare(old, new) if text.startswith("matmul_forward"))
    assert line.split() == ["matmul_forward", "1", "1.100", "1.100", "1.100", "1.000"]
    assert not any(
        text.startswith(("elementwise ", "token_logprobs ")) for text in compare(old, new)
    )
    (bar_line,) = (text for text in compare(old, new) if text.startswith("matmul_lowest"))
    assert bar_line.split()[1:3] == ["2.000", "2.000"]


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
