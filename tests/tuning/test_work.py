"""Candidates are compared by bytes, each on operands of its own."""

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from rl_consistency.cases.launches import compare
from rl_consistency.kernels.core.findings import rows_bucket
from rl_consistency.tuning.policy_works import fewer_rows, with_fewer


def too_large(x):
    raise OutOfResources(300_000, 232_448, "shared memory")


def test_other_bytes_are_counted_and_named(make_work, candidate):
    work = make_work({"own": candidate(1.0), "same": candidate(1.0), "wrong": candidate(1.0, 1.25)})
    found = compare(work, work.operands())
    assert set(found.equal) == {"own", "same"}
    assert found.withdrawn == {"wrong": "8 of 8 elements differ from own"}


def test_zeros_of_two_signs_and_nan_of_two_payloads_are_other_bytes(make_work):
    def signed(x):
        return torch.where(x == 0, -0.0, x)

    work = make_work({"own": lambda x: x + 0.0, "signed": signed})
    assert compare(work, work.operands()).withdrawn == {"signed": "1 of 8 elements differ from own"}
    work = make_work({"own": lambda x: x / 0, "other": lambda x: -(x / 0)})
    assert "8 of 8" in compare(work, work.operands()).withdrawn["other"]


def test_every_result_of_a_tuple_is_compared(make_work):
    work = make_work({"own": lambda x: (x, x + 1), "second": lambda x: (x, x + 2)})
    assert compare(work, work.operands()).withdrawn == {
        "second": "8 of 16 elements differ from own"
    }


def test_a_candidate_that_does_not_fit_is_named_and_a_default_that_does_not_is_an_error(make_work):
    work = make_work({"own": lambda x: x, "large": too_large})
    assert "shared memory" in str(compare(work, work.operands()).unable["large"])
    with pytest.raises(OutOfResources):
        compare(make_work({"large": too_large}), work.operands())


@pytest.mark.parametrize(
    "error", [PTXASError("ptxas died"), RuntimeError("PassManager::run failed")], ids=repr
)
def test_a_candidate_that_does_not_compile_is_named_and_the_others_go_on(
    make_work, candidate, error
):
    def broken(x):
        raise error

    work = make_work({"own": candidate(1.0), "broken": broken, "last": candidate(1.0)})
    found = compare(work, work.operands())
    assert found.unable == {"broken": error} and set(found.equal) == {"own", "last"}
    with pytest.raises(type(error)):
        compare(make_work({"broken": broken}), work.operands())


def test_an_error_of_the_device_is_not_taken_for_one_of_the_compiler(make_work, candidate):
    def lost(x):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    work = make_work({"own": candidate(1.0), "lost": lost})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compare(work, work.operands())


def test_only_some_are_run_beside_the_default(make_work, candidate):
    work = make_work({name: candidate(1.0) for name in ("own", "a", "b")})
    assert set(compare(work, work.operands(), ("b",)).equal) == {"own", "b"}
    assert work.candidates["a"].calls == 0


def test_a_default_that_is_no_candidate_gives_way_to_the_first(make_work, candidate):
    work = make_work({"a": candidate(1.0), "b": candidate(1.0)}, picked="of another table")
    assert work.default == "a" and work.key == "add n=8"


def test_fewer_rows_lie_in_the_same_bucket():
    for exponent in range(4, 15):
        rows = 1 << exponent
        assert rows_bucket(fewer_rows(rows)) == rows > fewer_rows(rows)
    assert fewer_rows(1) == 1


def test_works_of_one_entry_and_other_rows_are_paired(make_work, candidate):
    most, same, alone = (
        make_work({"own": candidate(1e-6)}, entry=entry, shape={"n": 8}) for entry in "abc"
    )
    fewer = make_work({"own": candidate(1e-6)}, entry="a", shape={"n": 5})
    found = with_fewer([most, same, alone], [fewer, same])
    assert [work.entry for work in found] == ["a", "b", "c"]
    assert [work.fewer for work in found] == [fewer, None, None]
