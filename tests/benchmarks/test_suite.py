"""What becomes of a suite, of a case that raises, and of the file when a run is cut short."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.results import Results, load
from benchmarks.suite import Case, Run, Suite, bar_lines, measured, run_meta
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


FOLD = Suite("gradient_fold", [case(good)])


def session(file=None, quick=False):
    meta = run_meta(torch.device("cpu"), "python -m benchmarks ops", "abc")
    return Run(Results(), meta, file, quick)


def test_a_run_is_recorded_with_what_it_ran_on(tmp_path):
    run = session(tmp_path / "gpu.json")
    run.measure([FOLD], machine())
    record = load(tmp_path / "gpu.json").meta["suites"]["gradient_fold"]
    assert record["commit"] == "abc" and record["kernels_sha256"] == kernels_hash()
    assert record["command"] == "python -m benchmarks ops" and record["complete"]
    assert {"device", "versions", "date"} <= run.results.meta.keys()


def test_a_case_that_raises_is_a_row_and_the_others_go_on(tmp_path):
    file = tmp_path / "gpu.json"
    run = session(file)
    full = case(raising(torch.OutOfMemoryError("CUDA out of memory")))
    failed_cases = run.measure([Suite("gradient_fold", [full, case(good)])], machine())
    failed, fine = load(file).rows
    assert failed.error == "OutOfMemoryError: CUDA out of memory" and failed.ratio is None
    assert fine.ratio == 2.0
    assert failed_cases == ["gradient_fold: dW fold tokens=16 n=32"]
    assert run.results.bars["gradient_fold_geomean"]["met"] is False


def test_a_whole_suite_is_complete_and_a_quick_one_is_not():
    for run, complete in ((session(), True), (session(quick=True), False)):
        assert run.measure([FOLD], machine()) == []
        assert run.results.meta["suites"]["gradient_fold"]["complete"] is complete
        assert run.results.bars["gradient_fold_geomean"]["met"] is complete


def test_a_killed_run_keeps_the_suites_that_were_done(tmp_path):
    file = tmp_path / "gpu.json"
    killed = Suite("elementwise", [case(good), case(raising(KeyboardInterrupt()))])
    with pytest.raises(KeyboardInterrupt):
        session(file).measure([FOLD, killed], machine())
    assert [row.suite for row in load(file).rows] == ["gradient_fold"]


def test_a_lost_device_ends_the_run_with_what_was_measured(tmp_path):
    file = tmp_path / "gpu.json"
    lost = case(raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    suites = [Suite("gradient_fold", [case(good), lost, case(good)]), Suite("elementwise", [])]
    with pytest.raises(OSError, match="no longer answers"):
        session(file).measure(suites, machine())
    assert [row.suite for row in load(file).rows] == ["gradient_fold"] * 2


def test_an_interrupt_is_no_error_of_a_case():
    with pytest.raises(KeyboardInterrupt):
        measured("gradient_fold", case(raising(KeyboardInterrupt())), machine())


def test_a_missed_bar_is_printed_as_missed():
    run = session()
    slow = case(lambda m: good(m) | {"ratio": 0.7})
    run.measure([Suite("gradient_fold", [slow])], machine())
    (line,) = bar_lines(run.results)
    assert line.startswith("missed") and "0.700" in line
