"""What becomes of a suite, of a case that raises, and of the file when a run is cut short."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import suite
from benchmarks.results import Results, load
from benchmarks.suite import Case, run_meta
from benchmarks.timing import Ceilings
from rl_consistency.kernels.core.kernels_hash import kernels_hash


def machine():
    return SimpleNamespace(device=torch.device("cpu"), ceilings=Ceilings(4e12, 7e14))


def case(run):
    return Case(work="dW fold", shape={"tokens": 16, "n": 32}, run=run)


def good(machine):
    return {"ours_us": 10.0, "stock_us": 20.0, "ratio": 2.0}


def raising(error):
    def run(machine):
        raise error

    return run


FOLD = {"gradient_fold": [case(good)]}


def measure(suites, file=None, results=None, commit="abc"):
    meta = run_meta(torch.device("cpu"), "python -m benchmarks ops", commit)
    return suite.measure(suites, machine(), results or Results(), meta, file)


def test_a_run_is_recorded_with_what_it_ran_on(tmp_path):
    results = measure(FOLD, tmp_path / "gpu.json")
    record = load(tmp_path / "gpu.json").meta["suites"]["gradient_fold"]
    assert record["commit"] == "abc" and record["kernels_sha256"] == kernels_hash()
    assert record["command"] == "python -m benchmarks ops" and record["complete"]
    assert {"device", "versions", "date"} <= results.meta.keys()
    (row,) = results.rows
    assert row.commit == "abc" and row.kernels == kernels_hash()[:12]
    assert results.bars["gradient_fold_geomean"]["met"]


def test_a_suite_records_the_models_that_it_has_cases_of():
    def of(*names, run=good):
        return [Case(work="step", shape={"model": name}, run=run) for name in names]

    suites = {"dense": of("a", "b"), "sparse": of("c", run=raising(ValueError("no")))}
    meta = run_meta(torch.device("cpu"), "python -m benchmarks train", "abc")
    only = {"model": ["a", "b", "c"]}
    found = suite.measure(suites, machine(), Results(), meta, only=only).meta["suites"]
    assert found["dense"]["parts"] == {"a": True, "b": True}
    assert found["sparse"]["parts"] == {"c": False}


def test_a_case_that_raises_is_a_row_and_the_others_go_on(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    full = case(raising(torch.OutOfMemoryError("CUDA out of memory")))
    results = measure({"gradient_fold": [full, case(good)]}, file)
    failed, fine = load(file).rows
    assert failed.error == "OutOfMemoryError: CUDA out of memory" and failed.ratio is None
    assert fine.ratio == 2.0
    said = "gradient_fold: dW fold bfloat16 tokens=16 n=32: OutOfMemoryError: CUDA out of memory"
    assert capsys.readouterr().err.strip() == said
    assert results.bars["gradient_fold_geomean"]["met"] is False


def test_a_killed_run_keeps_what_was_done_and_the_rows_of_what_was_not_reached(tmp_path):
    file = tmp_path / "gpu.json"
    first, second = (replace(case(good), shape={"tokens": n}) for n in (1, 2))
    killed = {"attention_forward": [first, replace(second, run=raising(KeyboardInterrupt()))]}
    with pytest.raises(KeyboardInterrupt):
        measure(FOLD | killed, file)
    found = load(file)
    assert [row.suite for row in found.rows] == ["gradient_fold", "attention_forward"]
    complete = {suite: record["complete"] for suite, record in found.meta["suites"].items()}
    assert complete == {"gradient_fold": True, "attention_forward": False}
    whole = measure({"attention_forward": [first, second]}, file, found, commit="old")
    with pytest.raises(KeyboardInterrupt):
        measure(killed, file, whole, commit="new")
    found = load(file)
    rows = found.of("attention_forward")
    assert [(row.shape["tokens"], row.commit) for row in rows] == [(1, "new"), (2, "old")]
    record = found.meta["suites"]["attention_forward"]
    assert record["complete"] is True and (record["cases"], record["older"]) == (2, 1)


def test_an_error_makes_a_suite_incomplete_also_where_other_rows_are_older(tmp_path):
    file = tmp_path / "gpu.json"
    first, second = (replace(case(good), shape={"tokens": n}) for n in (1, 2))
    whole = measure({"attention_forward": [first, second]}, file)
    failing = replace(first, run=raising(ValueError("other")))
    killed = [failing, replace(second, run=raising(KeyboardInterrupt()))]
    with pytest.raises(KeyboardInterrupt):
        measure({"attention_forward": killed}, file, whole)
    record = load(file).meta["suites"]["attention_forward"]
    assert (record["complete"], record["errors"], record["cases"]) == (False, 1, 2)


def test_a_lost_device_ends_the_run_and_keeps_the_suites_that_were_done(tmp_path):
    file = tmp_path / "gpu.json"
    lost = case(raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(OSError, match="no longer answers after elementwise: dW fold"):
        measure(FOLD | {"elementwise": [lost, case(raising(KeyboardInterrupt()))]}, file)
    assert [row.suite for row in load(file).rows] == ["gradient_fold"]
