"""Tuning at random shapes: which schedules are timed, and that all of them are compiled."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.random_shapes import draw_folds, draw_products
from benchmarks.tune import random_works
from benchmarks.tune.harness import measured
from benchmarks.tune.random_works import (
    BF16,
    RANDOM_OPS,
    compile_schedules,
    compile_share,
    multiply_and_add,
)
from rl_consistency.kernels.gradient_fold.schedules import candidates as fold_candidates
from rl_consistency.kernels.matmul.schedules import CANDIDATES, fitting
from rl_consistency.tuning import products as products_of_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("m", [1, 2, 7, 16, 33, 96, 700, 1000, 5000, 16384])
def test_several_heights_of_tiles_are_timed_for_any_number_of_rows(m):
    found = fitting(m)
    assert {s.kind for s in found} == {"tma"} and len(found) >= 10
    assert len({s.block_m for s in found}) > 1
    assert max(s.block_m for s in found) <= max(32, 4 * m)


def test_every_schedule_by_descriptor_fits_some_rows():
    found = {s.name for m in (1, 64, 16384) for s in fitting(m)}
    assert found == {s.name for s in CANDIDATES if s.kind == "tma"}


def test_works_have_the_shapes_of_the_seed_and_time_the_schedule_of_today(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(products_of_weights, "has_tma", lambda device: True)
        products = list(RANDOM_OPS["matmul"](CPU, 3, 30))
    assert [work.shape for work in products] == draw_products(3, 30)
    folds = list(RANDOM_OPS["fold"](CPU, 3, 30))
    assert [work.shape for work in folds] == draw_folds(3, 30)
    for work in products:
        assert work.picked in work.candidates
        assert list(work.others) == ["cublaslt"] * (work.shape["m"] > 1)
    for work in folds:
        assert set(work.candidates) == {s.name for s in fold_candidates(BF16, tma=False)}
        assert list(work.others) == ["cublas fp32 + add"]


def at_once(i):
    return 1e-6


def test_a_row_has_the_time_of_every_schedule_and_of_the_library(monkeypatch):
    """A fold through Triton's interpreter, at a size it can do."""
    shape = {"tokens": 16, "n": 32, "k": 32}
    monkeypatch.setattr(random_works, "draw_folds", lambda seed, count: [shape])
    monkeypatch.setattr(
        random_works,
        "multiply_and_add",
        lambda dy, x, gradient: gradient.add_(dy.float().t() @ x.float()),
    )
    (work,) = RANDOM_OPS["fold"](CPU, 0, 1)
    bench = SimpleNamespace(copies=lambda size: 1, timers=lambda calls: {n: at_once for n in calls})
    row = measured(work, bench)
    assert row["shape"] == shape and row["refused"] == [] and row["picked"] == work.picked
    assert set(row["us"]) == {*work.candidates, "cublas fp32 + add"}


def test_the_vendors_way_adds_to_the_gradient_it_is_given(monkeypatch):
    def mm(a, b, out_dtype):
        assert out_dtype == torch.float32
        return a.float() @ b.float()

    monkeypatch.setattr(torch, "mm", mm)
    dy, x, gradient = torch.ones(4, 2), torch.ones(4, 3), torch.ones(2, 3)
    assert multiply_and_add(dy, x, gradient) is gradient
    assert gradient.eq(5.0).all()


def compiled(monkeypatch, run):
    """What `run` ran, of works with three schedules each, one of which needs too much memory."""
    ran = []

    def work(op, i):
        def too_large():
            ran.append((op, i, "large"))
            raise OutOfResources(2, 1, "shared memory")

        calls = {name: lambda name=name: ran.append((op, i, name)) for name in ("a", "b")}
        return SimpleNamespace(candidates=calls | {"large": too_large}, operands=lambda: ())

    monkeypatch.setattr(random_works, "_compiled_works", lambda op, d: [work(op, i) for i in "xy"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run()
    return ran


@pytest.mark.parametrize("workers", [1, 4, 9])
def test_the_shares_of_all_workers_are_every_schedule_once(monkeypatch, workers):
    def run():
        for worker in range(workers):
            compile_share("fold", worker, workers)

    ran = compiled(monkeypatch, run)
    assert sorted(ran) == [("fold", i, name) for i in "xy" for name in ("a", "b", "large")]


def test_an_error_of_a_worker_is_raised(monkeypatch):
    made = []

    def pool(workers, mp_context):
        made.append((workers, mp_context.get_start_method()))
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(random_works, "ProcessPoolExecutor", pool)
    ran = compiled(monkeypatch, lambda: compile_schedules("matmul", 3))
    assert len(ran) == 6 and made == [(3, "spawn")]

    def broken(op, device):
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(random_works, "_compiled_works", broken)
    with pytest.raises(RuntimeError, match="no such GPU"):
        compile_schedules("matmul", 2)


def test_every_schedule_that_may_be_timed_is_among_those_compiled():
    products = random_works._compiled_works("matmul", CPU)
    assert [work.shape["layout"] for work in products] == ["nt", "nn"]
    names = {s.name for s in CANDIDATES if s.kind == "tma"}
    assert all(set(work.candidates) == names for work in products)
    (fold,) = random_works._compiled_works("fold", CPU)
    (timed,) = RANDOM_OPS["fold"](CPU, 0, 1)
    assert set(fold.candidates) == set(timed.candidates)
