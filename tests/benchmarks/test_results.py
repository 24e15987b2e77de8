"""Benchmark results: rows, bars, and the file they are merged into."""

import json
import math
from dataclasses import asdict, replace

import pytest

from benchmarks.bars import BARS
from benchmarks.results import Results, compare, load, save
from benchmarks.rows import geometric_mean
from benchmarks.shapes import NAMED
from tests.benchmarks.made_rows import bar, row

META = {"device": "Test GPU", "commit": "abc", "versions": {"torch": "2.11", "triton": "3.6"}}
RECORD = {"complete": True, "commit": "abc"}


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


def test_files_measured_side_by_side_are_joined():
    def measured(suite, found, whole=True, **only):
        return Results().merged(suite, found, META, RECORD | {"complete": whole}, only=only)

    def fold(seed, ratio):
        return row("gradient_fold_random", ratio, shape={"seed": seed, "tokens": 8})

    name = "gradient_fold_random"
    base = measured(name, [fold(1, 0.5), fold(2, 0.6)], seed=[1, 2])
    base = base.merged("elementwise", [row("elementwise", 1.5)], META, RECORD)
    new = base.joined(measured(name, [fold(2, 1.2), fold(3, 1.3)], seed=[2, 3]))
    assert [r.ratio for r in new.of(name)] == [0.5, 1.2, 1.3]
    assert new.of("elementwise") == base.of("elementwise")
    assert new.meta["suites"][name]["parts"] == {"1": True, "2": True, "3": True}
    cut = new.joined(measured(name, [fold(3, 1.4)], whole=False, seed=[3]))
    assert cut.meta["suites"][name]["parts"] == {"1": True, "2": True, "3": False}
    assert new.bars[name]["complete"] and not cut.bars[name]["complete"]
    whole = new.joined(measured("elementwise", [row("elementwise", 1.1)]))
    assert [r.ratio for r in whole.of("elementwise")] == [1.1]
    assert new.meta["suites"][name]["parts"]["3"] is True  # nothing is written in place


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
        json.dumps({"rows": [asdict(row()) | {"ratio": 10**400}], "meta": META}),
        json.dumps({"rows": [asdict(row()) | {"suite": []}], "meta": META}),
        json.dumps({"rows": [asdict(row()) | {"shape": {"m": math.inf}}], "meta": META}),
        json.dumps({"rows": [asdict(row()) | {"tokens_per_second": {"ours": "a"}}], "meta": META}),
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


def test_a_suite_whose_rows_are_missing_meets_no_bar():
    rows, record = [row("attention_decode", r) for r in (1.2, 1.1)], {"complete": True, "cases": 2}
    results = Results(tuple(rows), {"suites": {"attention_decode": record}})
    assert results.bars["attention_decode"]["met"]
    assert not replace(results, rows=results.rows[:1]).bars["attention_decode"]["met"]
    assert not replace(results, meta={}).bars["attention_decode"]["met"]


def test_a_bar_of_two_seeds_needs_the_record_of_its_suite():
    rows = [row("gradient_fold_random", 2.0, shape={"seed": seed, "tokens": 8}) for seed in (1, 2)]
    assert bar("gradient_fold_random", rows)["met"]
    assert not Results(tuple(rows)).bars["gradient_fold_random"]["met"]
    assert not bar("gradient_fold_random", rows, gradient_fold_random="no")["met"]


def test_rows_without_a_size_are_no_part_of_a_run():
    odd = row("gradient_fold_random", 2.0, shape={"tokens": 8})
    results = Results((odd,)).merged("gradient_fold_random", [], META, RECORD, only={"seed": [1]})
    assert results.rows == (odd,)
