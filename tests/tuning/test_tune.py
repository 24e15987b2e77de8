"""The works one by one within a budget; what is left out is told."""

import pytest
import torch

import rl_consistency
from rl_consistency.kernels.core.findings import Findings
from rl_consistency.tuning.tune import tune, tune_works
from rl_consistency.verify.presets import build_preset


@pytest.fixture
def works(make_work, candidate):
    """Four works, each with a faster schedule."""

    def one(i):
        candidates = {"own": candidate(10e-6), "fast": candidate(5e-6)}
        return make_work(candidates, shape={"n": i}, entry=f"add/n{i}")

    return [one(i) for i in range(4)]


def test_every_work_is_tuned_and_kept(works, bench, store):
    told = []
    report = tune_works(
        works, bench, store, clock=lambda: 1.5, tell=lambda o, name: told.append((o, name))
    )
    assert [o.winner for o in report.outcomes] == ["fast"] * 4 and report.left_out == {}
    assert report.passed and report.withdrawn == {} and report.seconds == 1.5
    assert report.path == str(store.path) and set(store.winners) == {f"add/n{i}" for i in range(4)}
    assert [name for _, name in told] == [f"add n={i}" for i in range(4) for _ in range(2)]
    assert [o for o, _ in told] == [x for o in report.outcomes for x in (None, o)]


def test_a_spent_budget_leaves_the_rest_out_by_name_and_the_next_run_goes_on(works, bench, store):
    clock = iter([0.0, 6.0, 11.0, 12.0, 13.0])
    report = tune_works(works, bench, store, clock=lambda: next(clock), budget=10.0)
    assert len(report.outcomes) == 2
    assert report.left_out == dict.fromkeys(("add/n2", "add/n3"), "the budget of 10 s was spent")
    report = tune_works(works, bench, store, clock=lambda: 0.0)
    assert [o.known for o in report.outcomes] == [True, True, False, False]


def test_a_work_without_room_is_left_out(works, make_bench, make_work, candidate, store):
    large = make_work({"own": candidate(1e-6)}, entry="large", moved=2.0**31)
    report = tune_works([large, works[0]], make_bench(free=2.0**31), store, clock=lambda: 0.0)
    assert report.left_out == {"large": "it needs 6.0 GiB of free memory"}
    assert len(report.outcomes) == 1


def test_memory_that_runs_out_leaves_one_work_out(works, bench, store, make_work):
    def exhausted(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    report = tune_works([make_work({"own": exhausted}), *works], bench, store, clock=lambda: 0.0)
    assert report.left_out == {"add/n8/m1": "the GPU's memory ran out"}
    assert len(report.outcomes) == 4


def test_without_write_access_winners_are_in_force_in_this_process(works, bench, tmp_path):
    (tmp_path / "file").write_text("")
    store = Findings(tmp_path / "file" / "findings.json", {})
    with pytest.warns(UserWarning, match="cannot be written") as told:
        tune_works(works, bench, store, clock=lambda: 0.0)
    assert sum("cannot be written" in str(w.message) for w in told) == 1
    assert len(store.winners) == 4


def test_a_cpu_has_nothing_to_tune():
    with pytest.raises(ValueError, match="nothing to tune on cpu: the CPU has one schedule"):
        tune(build_preset("tiny-llama"))
    for wrong in (None, 3, object()):
        with pytest.raises(TypeError, match="tune takes a Hugging Face causal LM, got"):
            tune(wrong)
    assert rl_consistency.tune is tune
