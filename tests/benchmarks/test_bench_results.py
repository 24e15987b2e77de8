"""Benchmark results: rows, bars, and the file they are merged into."""

import json
from dataclasses import asdict

import pytest

from benchmarks.results_file import (
    BARS,
    Results,
    Row,
    geometric_mean,
    judge,
    load,
    save,
)
from rl_consistency.kernels.core.kernels_hash import kernels_hash

META = {"device": "Test GPU", "commit": "abc", "versions": {"torch": "2.11", "triton": "3.6"}}
RECORD = {"complete": True, "commit": "abc"}


def row(suite="matmul_forward", ratio=1.0, **fields):
    fields = {"work": suite, "shape": {"tokens": 8192, "width": 4096}, "dtype": "bfloat16"} | fields
    times = {"ours_us": 10.0, "stock_us": 10.0 * ratio, "ratio": ratio} if ratio else {}
    return Row(suite=suite, **times | fields)


def bar(name, rows, **complete):
    suites = {suite: True for suite in BARS[name].suites} | complete
    return judge(rows, suites)[name]


def test_geometric_mean_and_lowest_run_over_forward_and_dx_together():
    rows = [row(ratio=2.0), row(ratio=0.5), row("matmul_dx", ratio=1.0)]
    geomean = bar("matmul_geomean", rows)
    assert geomean["figure"] == pytest.approx(1.0)
    assert geomean["met"] == (geomean["figure"] >= 1.0)
    lowest = bar("matmul_lowest", rows)
    assert (lowest["figure"], lowest["met"]) == (0.5, False)
    assert bar("matmul_lowest", [row(ratio=0.93), row("matmul_dx", ratio=3.0)])["met"]


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


def test_an_upper_bar_is_missed_above_and_by_a_figure_that_is_not_finite():
    assert bar("accuracy", [row("accuracy", None, error_ratio=1.04)])["met"]
    assert not bar("accuracy", [row("accuracy", None, error_ratio=1.06)])["met"]
    assert not bar("accuracy", [row("accuracy", None, error_ratio=float("inf"))])["met"]
    assert not bar("accuracy", [row("accuracy", None, error_ratio=float("nan"))])["met"]


def test_an_incomplete_suite_meets_no_bar():
    found = bar("gradient_fold_geomean", [row("gradient_fold", 2.0)], gradient_fold=False)
    assert (found["figure"], found["complete"], found["met"]) == (2.0, False, False)
    one_half = bar("matmul_lowest", [row(ratio=2.0)], matmul_dx=False)
    assert one_half["met"] is False


def test_an_error_row_counts_in_no_figure():
    failed = row("gradient_fold", None, error="RuntimeError: out of memory")
    assert bar("gradient_fold_geomean", [failed])["figure"] is None
    assert geometric_mean([]) is None


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


def test_rows_carry_what_the_results_file_promises(tmp_path):
    file = tmp_path / "gpu.json"
    save(file, Results((row(),), META))
    content = json.loads(file.read_text())
    promised = {"suite", "work", "shape", "dtype", "ours_us", "stock_us", "peers", "ratio"}
    assert promised | {"ceiling_fraction"} <= content["rows"][0].keys()
    assert {"figure", "bar", "met"} <= content["bars"]["accuracy"].keys()


def test_another_device_is_refused(tmp_path):
    file = tmp_path / "gpu.json"
    assert load(file, "Test GPU") == Results((), {})
    save(file, Results((row(),), META))
    with pytest.raises(ValueError, match="holds results of 'Test GPU' and this is 'Other'"):
        load(file, "Other")


def content(*, rows=(), meta=None, **more):
    return json.dumps({"rows": list(rows), "meta": meta if meta is not None else {}} | more)


def damaged(**fields):
    return content(rows=[asdict(row("elementwise")) | fields])


DAMAGE = {
    "cut": "{",
    "empty": "",
    "not UTF-8": content(meta={"device": "GPU \xe9"}).replace("\\u00e9", "\xe9").encode("latin-1"),
    "UTF-16": content().encode("utf-16"),
    "nested without end": "[" * 100_000,
    "a number": "7",
    "a list": "[]",
    "no rows": '{"meta": {}}',
    "no meta": '{"rows": []}',
    "an unknown part": content(notes="measured twice"),
    "meta is a list": '{"rows": [], "meta": []}',
    "rows are an object": '{"rows": {}, "meta": {}}',
    "rows are text": '{"rows": "", "meta": {}}',
    "bars are a list": content(bars=[]),
    "suites are a list": content(meta={"suites": []}),
    "a suite is no object": content(meta={"suites": {"x": 1}}),
    "a suite does not say whether it is complete": content(meta={"suites": {"x": {}}}),
    "a suite is complete by a word": content(meta={"suites": {"x": {"complete": "no"}}}),
    "a row is a number": content(rows=[1]),
    "a row is a list": content(rows=[["suite"]]),
    "a row is null": content(rows=[None]),
    "an unknown field": content(rows=[asdict(row()) | {"speed": 1}]),
    "missing fields": content(rows=[{"suite": "x"}]),
    "a suite without a name": damaged(suite=None),
    "a ratio in words": damaged(ratio="fast"),
    "a ratio of nothing": damaged(suite="gradient_fold", ratio=0.0),
    "no shape": damaged(shape=None),
    "a shape without what its bar asks for": damaged(shape={"tokens": 8192}),
    "a size that is no number": damaged(shape={"tokens": "many", "width": 4096}),
    "peers are a list": damaged(peers=[]),
    "a peer without a time": damaged(peers={"liger": None}),
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_name_and_kept(tmp_path, text):
    file = tmp_path / "gpu.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = file.read_bytes()
    with pytest.raises(ValueError) as refusal:
        load(file)
    assert str(refusal.value).startswith(f"{file} is no results file of `rl-consistency bench`: ")
    assert file.read_bytes() == before


def test_the_damage_is_what_is_refused(tmp_path):
    file = tmp_path / "gpu.json"
    suites = {"elementwise": {"complete": True}}
    file.write_text(content(rows=[asdict(row("elementwise"))], meta={"suites": suites}, bars={}))
    assert load(file).rows == (row("elementwise"),)


def test_the_kernel_hash_is_of_the_kernel_files():
    assert len(kernels_hash()) == 64
    assert kernels_hash() == kernels_hash()
