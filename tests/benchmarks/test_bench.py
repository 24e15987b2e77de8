"""`rl-consistency bench`: options, errors, and what becomes of a case that raises."""

import json

import pytest
import torch
from rich.console import Console

from benchmarks import command as bench
from benchmarks.command import Session, bars_table, measured, suite_line
from benchmarks.ops.suites import op_suites
from benchmarks.results_file import BARS, Results, load
from benchmarks.suite import Case, Suite
from benchmarks.timing import Ceilings
from benchmarks.train.step import model_suites
from rl_consistency.cli.main import main

META = {
    "device": "Test GPU",
    "versions": {},
    "commit": "abc",
    "kernels_sha256": "0" * 64,
    "command": "rl-consistency bench ops",
    "date": "2026-01-01T00:00:00+00:00",
}


class Machine:
    device = torch.device("cpu")
    ceilings = Ceilings(4e12, 7e14)


def case(run, **shape):
    return Case(work="dW fold", shape=shape or {"tokens": 16, "n": 32}, run=run)


def good(machine):
    return {"ours_us": 10.0, "stock_us": 20.0, "ratio": 2.0}


def out_of_memory(machine):
    raise torch.OutOfMemoryError("CUDA out of memory")


def lost(machine):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def session(file=None, quick=False):
    return Session(Results((), {}), dict(META), file, quick, Console(quiet=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_named(capsys):
    assert main(["bench", "ops"]) == 2
    assert "none is available here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ops", "--only", "matmul_forward,nothing"], "--only nothing: `bench ops` has matmul_"),
        (["model", "--only", "matmul_forward"], "`bench model` has training_step"),
        (["ops", "--seconds", "0"], "must be a positive number"),
        (["ops", "--seconds", "-1"], "must be a positive number"),
        (["ops", "--seconds", "nan"], "--seconds nan: must be a positive number"),
        (["ops", "--seconds", "inf"], "leave it out for no limit"),
        (["ops", "--json", "/absent/x.json"], "not a file in an existing directory"),
        (["ops", "--json", "/"], "not a file in an existing directory"),
        (["ops", "--json", "/proc/x.json"], "--json /proc/x.json: cannot be written"),
        (["ops", "--plot", "/absent"], "not an existing directory"),
        (["ops", "--plot", "/proc"], "--plot /proc: cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, options, message):
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_every_bar_names_suites_that_exist():
    known = {suite.name for suite in [*op_suites(), *model_suites()]}
    barred = {name for bar in BARS.values() for name in bar.suites}
    assert {name for name in barred if not name.startswith("rollout")} == known
    quick = [*op_suites(quick=True), *model_suites(quick=True)]
    assert {suite.name for suite in quick} == known
    assert sum(len(s.cases) for s in quick) < sum(len(s.cases) for s in op_suites()) / 4


def test_the_matmul_suites_are_14_weights_from_1_to_16384_rows():
    suites = {suite.name: suite for suite in op_suites()}
    for name in ("matmul_forward", "matmul_dx"):
        shapes = [c.shape for c in suites[name].cases]
        assert {s["m"] for s in shapes} == {2**i for i in range(15)}
        assert len({(s["n"], s["k"]) for s in shapes}) == 14


def test_a_case_that_raises_is_a_row_and_the_others_go_on(tmp_path):
    file = tmp_path / "gpu.json"
    run = session(file)
    run.measure([Suite("gradient_fold", "-", [case(out_of_memory), case(good)])], Machine(), None)
    failed, fine = load(file).rows
    assert failed.error == "OutOfMemoryError: CUDA out of memory" and failed.ratio is None
    assert fine.ratio == 2.0
    assert run.failed == ["gradient_fold: dW fold tokens=16 n=32"]
    record = load(file).meta["suites"]["gradient_fold"]
    assert (record["errors"], record["complete"]) == (1, False)
    assert run.results.bars["gradient_fold_geomean"]["met"] is False


def test_a_whole_suite_is_complete_and_a_quick_or_cut_one_is_not():
    suite = Suite("gradient_fold", "-", [case(good)])
    for run, deadline, complete in (
        (session(), None, True),
        (session(quick=True), None, False),
        (session(), 0.0, False),
    ):
        run.measure([suite], Machine(), deadline)
        assert run.results.meta["suites"]["gradient_fold"]["complete"] is complete
        assert run.results.bars["gradient_fold_geomean"]["met"] is complete
    assert run.results.rows == ()


def test_a_lost_device_ends_the_run_with_what_was_measured(tmp_path):
    file = tmp_path / "gpu.json"
    run = session(file)
    suites = [Suite("gradient_fold", "-", [case(good), case(lost), case(good)])]
    with pytest.raises(OSError, match="no longer answers"):
        run.measure([*suites, Suite("elementwise", "-", [case(good)])], Machine(), None)
    assert [r.suite for r in load(file).rows] == ["gradient_fold"] * 2


def test_an_interrupt_is_no_error_of_a_case():
    def interrupt(machine):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured("gradient_fold", case(interrupt), Machine())


def test_the_command_measures_saves_and_ends_with_a_line_of_json(monkeypatch, tmp_path, capsys):
    from benchmarks import timing as bench_timing
    from benchmarks.ops import suites as bench_ops

    suites = [Suite("gradient_fold", "-", [case(good)]), Suite("elementwise", "-", [case(lost)])]
    monkeypatch.setattr(bench_ops, "op_suites", lambda quick: suites)
    monkeypatch.setattr(bench_timing, "Machine", lambda device, seconds: Machine())
    monkeypatch.setattr(bench, "_meta", lambda args: dict(META))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    file = tmp_path / "gpu.json"
    options = ["bench", "ops", "--json", str(file), "--plot", str(tmp_path)]
    assert main([*options, "--only", "gradient_fold"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bars"]["gradient_fold_geomean"] == {"figure": 2.0, "bar": 0.95, "met": True}
    assert (tmp_path / "bench_gradient_fold.png").stat().st_size > 0
    monkeypatch.setattr(bench_ops, "op_suites", lambda quick: [Suite("x", "-", [case(IndexError)])])
    assert main(options) == 1
    file.write_text('{"rows": [], "meta": []}')
    assert main(options) == 2
    assert f"{file} is no results file" in capsys.readouterr().err
    assert file.read_text() == '{"rows": [], "meta": []}'


def test_the_tables_show_missed_bars_and_ratios():
    run = session()
    run.measure([Suite("gradient_fold", "-", [case(lambda m: good(m) | {"ratio": 0.7})])],
                Machine(), None)  # fmt: skip
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bars_table(run.results))
    assert "missed" in console.export_text()
    record = run.results.meta["suites"]["gradient_fold"]
    assert "lowest 0.700" in suite_line("gradient_fold", run.results.rows, record)


def test_the_commit_is_that_of_the_checkout():
    assert bench._commit() == "unknown" or len(bench._commit().split("-")[0]) == 40
