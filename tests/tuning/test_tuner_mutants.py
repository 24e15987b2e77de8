"""Negative controls: a tuner that is wrong in a known way turns its check red."""

import pytest
import torch

from rl_consistency.cases import launches
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings, Winner, choose
from rl_consistency.tuning import tune as tuning
from rl_consistency.tuning.tune import measured, tune_works

SECONDS = {"own": 10e-6, "slow": 30e-6, "fast": 5e-6, "wrong": 1e-6}
ENTRY = "add/n8/m1"


@pytest.fixture
def tuned(make_work, candidate, bench, store):
    """Tunes a work with a slow, a fast and a wrong candidate -> the report."""

    def run():
        candidates = {n: candidate(s, 2.0 if n == "wrong" else 1.0) for n, s in SECONDS.items()}
        return tune_works([make_work(candidates)], bench, store, clock=lambda: 0.0)

    return run


def keeps_the_fastest(report):
    """No winner is slower than the default or than any candidate of its bytes."""
    (outcome,) = report.outcomes
    return outcome.gain >= 1 and SECONDS[outcome.winner] == SECONDS["fast"]


def finds_the_wrong_one(report):
    return [name for name in report.withdrawn if name.endswith(": wrong")] and not report.passed


def test_the_tuner_passes_its_checks(tuned):
    report = tuned()
    assert keeps_the_fastest(report) and finds_the_wrong_one(report)


def test_a_tuner_that_keeps_the_slowest_is_caught(tuned, monkeypatch):
    monkeypatch.setattr(tuning, "fastest", lambda seconds: max(seconds, key=seconds.__getitem__))
    assert not keeps_the_fastest(tuned())


def test_a_tuner_that_looks_at_the_largest_rows_only_is_caught(
    make_work, candidate, bench, store, monkeypatch
):
    """For fewer rows of its bucket the fastest schedule is slower than the op's rule."""

    def runs_the_rule():
        fewer = make_work(
            {"own": candidate(1e-6), "fast": candidate(2e-6)},
            shape={"n": 4}, operands=lambda: (torch.arange(4.0),),
        )  # fmt: skip
        work = make_work({"own": candidate(10e-6), "fast": candidate(5e-6)}, fewer=fewer)
        return measured(work, bench, store, again=True).winner == "own"

    assert runs_the_rule()
    monkeypatch.setattr(tuning, "_holds_for_fewer", lambda *_: True)
    assert not runs_the_rule()


def test_a_tuner_that_compares_no_bytes_is_caught(tuned, monkeypatch):
    monkeypatch.setattr(launches, "_differing", lambda a, b: 0)
    report = tuned()
    assert not finds_the_wrong_one(report) and not keeps_the_fastest(report)


def test_a_wrong_candidate_in_a_tuned_cache_is_withdrawn_and_replaced(tuned, store):
    store.keep(ENTRY, Winner("wrong", 1.0, 10.0))
    report = tuned()
    assert finds_the_wrong_one(report) and keeps_the_fastest(report)
    again = Findings(store.path, {"device": "one"})
    assert again.winner(ENTRY).schedule == "fast" and again.is_withdrawn(ENTRY, "wrong")


def test_a_cache_that_trusts_what_it_knows_is_caught(tuned, store, monkeypatch):
    """The mutant takes a known winner without comparing its bytes."""
    store.keep(ENTRY, Winner("wrong", 1.0, 10.0))

    def trusting(work, operands, only):
        if set(only) == set(work.candidates):
            return launches.compare(work, operands)
        blind = {name: work.candidates[name] for name in only}
        return launches.Comparison((), work.default, blind, {}, {})

    monkeypatch.setattr(tuning, "compare", trusting)
    assert not finds_the_wrong_one(tuned())


def test_a_poisoned_entry_can_run_nothing_but_an_ops_own(store, monkeypatch):
    device = object()
    monkeypatch.setattr(findings_module, "_by_device", {device: store})
    store.keep("op", Winner("__import__('os').system('true')", 1.0, 2.0))
    with pytest.warns(UserWarning, match="is no schedule of this op"):
        assert choose(device, "op", ["own"]) is None
