"""Who wins: the fastest, if it beats the default twice by the margin; bytes come first."""

import pytest
import torch
from triton.runtime.errors import OutOfResources

from rl_consistency.kernels.core.findings import RULE, Winner
from rl_consistency.kernels.matmul.audit import schedule_audit, withdrawn_since
from rl_consistency.tuning.tune import MARGIN, measured, race

ENTRY = "add/n8/m1"


def constant(**seconds):
    return {name: lambda i, s=s: s for name, s in seconds.items()}


@pytest.mark.parametrize(("share", "winner"), [(MARGIN - 1e-3, "fast"), (MARGIN + 1e-3, "own")])
def test_a_challenger_has_to_win_by_the_margin(share, winner):
    found = race(constant(own=10e-6, fast=share * 10e-6), "own")
    assert found.schedule == winner
    assert found.us <= found.default_us


def test_a_challenger_that_was_lucky_once_has_to_win_again():
    """It is fast in the first two measurements, 3 and 7 rounds, and slow when it is confirmed."""
    times = iter([5e-6] * 10 + [15e-6] * 7)
    found = race({"own": lambda i: 10e-6, "lucky": lambda i: next(times)}, "own")
    assert found.schedule == "own" and found.us == found.default_us == pytest.approx(10.0)


def test_the_fastest_candidate_is_kept(make_work, candidate, bench, store):
    work = make_work({"own": candidate(10e-6), "slow": candidate(30e-6), "fast": candidate(5e-6)})
    found = measured(work, bench, store)
    assert (found.default, found.winner, found.gain) == ("own", "fast", pytest.approx(2.0))
    assert store.winner(ENTRY) == Winner("fast", *map(pytest.approx, (5.0, 10.0)))
    assert bench.prepared == [3] and not found.known and found.withdrawn == {}


def test_where_nothing_is_faster_the_rule_stays_in_force(make_work, candidate, bench, store):
    """It may take another schedule at other rows of the bucket, so its pick here is not kept."""
    own = candidate(5e-6)
    work = make_work({"own": own, "slow": candidate(30e-6)})
    found = measured(work, bench, store)
    assert found.winner == found.default == "own" and found.gain == 1.0
    assert store.winner(ENTRY) is None and store.finding(ENTRY) == Winner(RULE, 5.0, 5.0)
    before = own.samples
    again = measured(work, bench, store)
    assert again.known and again.winner == "own" and again.gain == 1.0 and own.samples == before


FEWER = {"shape": {"n": 4}, "operands": lambda: (torch.arange(4.0),)}


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"own": 6e-6, "fast": 5e-6}, "fast"),  # it wins there too
        ({"own": 5e-6, "fast": 5e-6 / (MARGIN + 1e-3)}, "fast"),  # it does not lose by the margin
        ({"own": 5e-6, "fast": 5e-6 / (MARGIN - 1e-3)}, "own"),
        ({"fast": 9e-6, "own": 5e-6}, "fast"),  # the rule takes it there by itself
    ],
)
def test_a_winner_must_not_lose_to_the_rule_at_fewer_rows_of_its_bucket(
    make_work, candidate, bench, store, seconds, winner
):
    fewer = make_work({name: candidate(s) for name, s in seconds.items()}, **FEWER)
    work = make_work({"own": candidate(10e-6), "fast": candidate(5e-6)}, fewer=fewer)
    found = measured(work, bench, store)
    kept = store.winner(ENTRY)
    assert found.winner == winner and (kept is not None) == (winner == "fast")
    assert found.gain == pytest.approx(2.0 if kept else 1.0)


def test_a_winner_of_other_bytes_at_fewer_rows_is_withdrawn(make_work, candidate, bench, store):
    fewer = make_work({"own": candidate(6e-6), "fast": candidate(5e-6, added=2.0)}, **FEWER)
    work = make_work({"own": candidate(10e-6), "fast": candidate(5e-6)}, fewer=fewer)
    found = measured(work, bench, store)
    assert found.winner == "own" and store.winner(ENTRY) is None
    reason = "4 of 4 elements differ from own"
    assert found.withdrawn == {"fast": reason} and store.withdrawn == {f"{ENTRY}: fast": reason}


def test_a_winner_that_does_not_fit_at_fewer_rows_is_no_winner(make_work, candidate, bench, store):
    def too_large(x):
        raise OutOfResources(2, 1, "shared memory")

    fewer = make_work({"own": candidate(6e-6), "fast": too_large}, **FEWER)
    work = make_work({"own": candidate(10e-6), "fast": candidate(5e-6)}, fewer=fewer)
    assert measured(work, bench, store).winner == "own" and store.withdrawn == {}


def test_a_candidate_of_other_bytes_is_withdrawn_and_never_timed(
    make_work, candidate, bench, store
):
    wrong = candidate(1e-6, added=1.25)
    work = make_work({"own": candidate(10e-6), "wrong": wrong, "fast": candidate(5e-6)})
    found = measured(work, bench, store)
    assert found.winner == "fast" and wrong.samples == 0
    reason = "8 of 8 elements differ from own"
    assert found.withdrawn == {"wrong": reason} and store.withdrawn == {f"{ENTRY}: wrong": reason}
    # It never ran in an op, so nothing that was computed has to go.
    assert withdrawn_since(0) == []


def test_a_withdrawn_candidate_stays_withdrawn_when_its_bytes_are_equal_again(
    make_work, candidate, bench, store
):
    store.withdraw(f"{ENTRY}: once", "it differed")
    once = candidate(1e-6)
    found = measured(make_work({"own": candidate(10e-6), "once": once}), bench, store)
    assert (
        found.winner == "own" and once.samples == 0 and found.withdrawn == {"once": "it differed"}
    )


def test_what_is_known_is_compared_and_not_timed(make_work, candidate, bench, store):
    own, fast = candidate(10e-6), candidate(5e-6)
    work = make_work({"own": own, "fast": fast, "slow": candidate(30e-6)})
    measured(work, bench, store)
    before = own.samples, fast.samples, work.candidates["slow"].calls
    found = measured(work, bench, store)
    assert found.known and found.winner == "fast" and found.gain == pytest.approx(2.0)
    assert (own.samples, fast.samples, work.candidates["slow"].calls) == before
    assert bench.prepared == [3, 2]
    assert not measured(work, bench, store, again=True).known


def test_a_known_winner_of_other_bytes_is_withdrawn_and_the_work_measured_again(
    make_work, candidate, bench, store
):
    store.keep(ENTRY, Winner("wrong", 1.0, 10.0))
    work = make_work({"own": candidate(10e-6), "wrong": candidate(1e-6, 2.0), "b": candidate(5e-6)})
    found = measured(work, bench, store)
    assert found.winner == "b" == store.winner(ENTRY).schedule and set(found.withdrawn) == {"wrong"}
    assert withdrawn_since(0) == [f"{ENTRY}: wrong"] == schedule_audit().withdrawn


@pytest.mark.parametrize("name", ["os.system", ""])
def test_a_known_winner_that_is_no_candidate_is_measured_again(
    make_work, candidate, bench, store, name
):
    store.keep(ENTRY, Winner(name, 1.0, 10.0))
    found = measured(make_work({"own": candidate(10e-6), "b": candidate(5e-6)}), bench, store)
    assert not found.known and store.winner(ENTRY).schedule == "b"
