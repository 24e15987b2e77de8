"""`rl-consistency bench rollout`: suites, options, bars, tables, and the time limit."""

import time

import pytest
import torch
from rich.console import Console

from benchmarks import options as bench_options
from benchmarks.command import Session
from benchmarks.results_file import BARS, Results, Row, judge
from benchmarks.rollout.suites import own_workload, rollout_suites
from benchmarks.rollout.table import HEADS, rollout_cells, rollout_markdown
from benchmarks.suite import Case, OutOfTime, Suite
from benchmarks.timing import Ceilings
from rl_consistency.cli.main import _parser, main
from rl_consistency.verify.presets import REAL_PRESETS


class Machine:
    device = torch.device("cpu")
    ceilings = Ceilings(4e12, 7e14)
    deadline = None


def parsed(*options):
    arguments = ["bench", "rollout", *options]
    return _parser(arguments).parse_args(arguments)


def row(suite, **fields):
    shape = {"model": "qwen3-0.6b", "sequences": 256, "prompt": 512, "new_tokens": 1024}
    return Row(**{"suite": suite, "work": "decode", "shape": shape, "dtype": "bfloat16"} | fields)


def bar(name, *rows, complete=True):
    return judge(rows, dict.fromkeys(BARS[name].suites, complete))[name]


def test_every_rollout_bar_names_suites_that_exist_and_every_suite_has_a_bar():
    known = {suite.name for suite in rollout_suites()}
    barred = {name for bar in BARS.values() for name in bar.suites if name.startswith("rollout")}
    assert barred == known
    quick = rollout_suites(quick=True)
    assert {suite.name for suite in quick} < known
    assert sum(len(s.cases) for s in quick) < sum(len(s.cases) for s in rollout_suites())


def test_the_decode_suites_are_256_sequences_in_groups_of_8():
    suites = [s for s in rollout_suites() if s.name.startswith("rollout_decode")]
    assert [s.cases[0].shape["model"] for s in suites] == ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"]
    for suite in suites:
        shape = dict(suite.cases[0].shape)
        del shape["model"]
        assert shape == {"sequences": 256, "group": 8, "prompt": 512, "new_tokens": 1024}


def test_presets_of_the_options_are_those_of_real_shape():
    assert set(bench_options.PRESETS) == set(REAL_PRESETS)


def test_options_describe_a_workload_of_the_callers():
    assert own_workload(parsed()) is None
    suite = own_workload(parsed("--preset", "qwen3-8b", "--batch", "64", "--new-tokens", "16"))
    (case,) = suite.cases
    assert suite.name == "rollout_own" and not any(suite.name in b.suites for b in BARS.values())
    assert dict(case.shape) == {
        "model": "qwen3-8b",
        "sequences": 64,
        "group": 8,
        "prompt": 512,
        "new_tokens": 16,
    }
    (odd,) = own_workload(parsed("--batch", "3")).cases
    assert (odd.shape["group"], odd.shape["sequences"]) == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rollout", "--batch", "0"], "--batch 0: must be at least 1"),
        (["rollout", "--prompt-len", "-1"], "--prompt-len -1: must be at least 1"),
        (["rollout", "--model", "/absent"], "--model /absent: no directory with a config.json"),
        (["rollout", "--mode", "strict", "--only", "rollout_idle"], "--only has no meaning then"),
        (["rollout", "--only", "matmul_forward"], "`bench rollout` has rollout_decode_"),
        (["ops", "--new-tokens", "4"], "--new-tokens goes with `bench rollout`"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, options, message):
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_a_case_that_runs_out_of_time_has_no_row_and_leaves_its_suite_incomplete():
    def endless(machine):
        raise OutOfTime

    def good(machine):
        return {"ours_us": 1.0, "ratio": 1.0}

    shape = {"model": "x"}
    cases = [Case(work="decode", shape=shape, run=run) for run in (good, endless, good)]
    meta = {"device": "Test GPU"} | dict.fromkeys(("commit", "kernels_sha256", "command", "date"))
    session = Session(Results((), {}), meta, None, False, Console(quiet=True))
    session.measure([Suite("rollout_idle", "-", cases)], Machine(), time.perf_counter() + 60)
    assert len(session.results.rows) == 1 and not session.failed
    assert session.results.meta["suites"]["rollout_idle"]["complete"] is False


def test_decode_is_judged_by_the_slowest_shape_and_needs_all_three():
    ratios = {"qwen3-0.6b": 1.1, "qwen3-1.7b": 0.96, "qwen3-8b": 1.0}
    rows = [row(f"rollout_decode_{name}", ratio=ratio) for name, ratio in ratios.items()]
    assert bar("rollout_decode", *rows)["figure"] == 0.96
    assert not bar("rollout_decode", *rows)["met"]
    assert bar("rollout_decode", rows[0], rows[2])["met"]
    assert not bar("rollout_decode", rows[0], complete=False)["met"]


def test_bars_read_their_figures():
    roofline = [row("rollout_roofline", ceiling_fraction=f) for f in (0.7, 0.66)]
    assert bar("rollout_roofline", *roofline)["met"]
    elsewhere = row("rollout_decode_qwen3-8b", ceiling_fraction=0.6)
    assert bar("rollout_roofline", *roofline, elsewhere)["figure"] == 0.66
    idle = [row("rollout_idle", figures={"idle_share": f}) for f in (0.01, 0.05)]
    assert bar("rollout_idle", idle[0])["met"]
    assert bar("rollout_idle", *idle)["figure"] == 0.05 and not bar("rollout_idle", *idle)["met"]
    long = row("rollout_long_context", figures={"times_short": 1.61})
    assert not bar("rollout_long_context", long)["met"]
    assert bar("rollout_speculation", row("rollout_speculation", ratio=1.5))["met"]
    assert not bar("rollout_hugging_face", row("rollout_hugging_face", ratio=9.9))["met"]


def test_no_mismatch_counts_only_beside_a_stock_that_drifts():
    def drift(strict, stock):
        figures = {"strict/mismatched_tokens": strict, "stock/mismatched_tokens": stock}
        return bar("rollout_grpo_drift", row("rollout_grpo_step", ratio=1.0, figures=figures))

    assert drift(0, 7)["met"]
    assert not drift(1, 7)["met"]
    assert not drift(0, 0)["met"], "a check that stock passes shows nothing"


def test_an_absent_public_engine_is_said_and_is_no_error():
    said = row("rollout_public", unavailable={"vllm": "not installed"})
    found = bar("rollout_public", said)
    assert found["figure"] is None and not found["met"]
    assert rollout_cells(said)[-1] == "vllm: not installed" and said.error is None
    beside = row("rollout_public", ours_us=10.0, peers={"vllm batch-invariant": 12.0})
    assert bar("rollout_public", beside)["figure"] == pytest.approx(1.2)


def test_a_row_becomes_cells_in_both_tables():
    cells = rollout_cells(
        row(
            "rollout_decode_qwen3-0.6b",
            ratio=0.985,
            ceiling_fraction=0.61,
            tokens_per_second={"ours": 41000.4, "stock": 42000.0},
            figures={"strict/idle_share": 0.013, "strict/steps": 1030},
        )
    )
    assert cells == (
        "qwen3-0.6b: decode, 256 x (512 + 1024)",
        "41,000",
        "42,000",
        "0.98",
        "61%",
        "1.3%",
        "1,030 steps",
    )
    assert len(cells) == len(HEADS)
    failed = row("rollout_idle", error="RuntimeError: a | b")
    lines = rollout_markdown([failed])
    assert lines[-1].endswith("| RuntimeError: a / b |") and rollout_markdown([]) == []
    assert all(line.count("|") == len(HEADS) + 1 for line in lines[1:])
