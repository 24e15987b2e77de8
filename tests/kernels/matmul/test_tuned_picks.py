"""Picks ask for a winner first, take only schedules of their own, and fall back to the rule."""

import pytest
import torch

from rl_consistency.kernels.core.cache import tuned_schedules as winners_module
from rl_consistency.kernels.core.cache.tuned_schedules import Winner, forget_picks, tuned_schedules
from rl_consistency.kernels.gradient_fold import schedules as fold_schedules
from rl_consistency.kernels.gradient_fold.schedules import fold_work
from rl_consistency.kernels.linear.schedules import (
    GATE_UP,
    QKV,
    few_rows_candidates,
    gate_up_work,
    pick_gate_up,
    pick_qkv,
    qkv_work,
)
from rl_consistency.kernels.matmul.schedules import (
    CANDIDATES,
    LIBRARY,
    POINTER,
    POINTER_FP32,
    TRITON,
    candidates,
    library_work,
    pick,
    prefers_library,
    product_work,
)

BF16, FP32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")


@pytest.fixture(autouse=True)
def winners(monkeypatch):
    """Keeps a winner of this test."""
    monkeypatch.setattr(winners_module, "_by_device", {})
    forget_picks()
    yield lambda work, name: tuned_schedules(CPU).keep(work, Winner(name, 1.0, 2.0))
    forget_picks()


def other_than(schedule, table):
    return next(s for s in table if s != schedule)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(
    ("dtype", "tma", "table"),
    [(BF16, True, CANDIDATES), (BF16, False, POINTER), (FP32, True, POINTER_FP32)],
)
def test_a_product_takes_its_winner_in_its_bucket_only(winners, layout, dtype, tma, table):
    def picked(m, device=CPU, out_dtype=dtype):
        return pick(m, 1024, 4096, dtype, layout, tma, out_dtype, device)

    rule = picked(100)
    winner = other_than(rule, table)
    kind = tma and dtype != FP32
    winners(product_work(layout, dtype, dtype, kind, 128, 1024, 4096), winner.name)
    assert picked(100) == picked(65) == picked(128) == winner
    assert picked(100, device=None) == rule and picked(64) == picked(64, device=None)
    assert picked(100, out_dtype=torch.float16) == rule
    tuned_schedules(CPU).strike(
        product_work(layout, dtype, dtype, kind, 100, 1024, 4096), winner.name, "differs"
    )
    assert picked(100) == rule


def test_a_pointer_product_never_takes_a_descriptor_schedule(winners):
    """The mutant: a poisoned entry names what its operands do not admit."""
    winners(product_work("nt", BF16, BF16, False, 64, 8, 8), CANDIDATES[0].name)
    with pytest.warns(UserWarning, match="is no schedule of this op"):
        found = pick(64, 8, 8, BF16, "nt", False, BF16, CPU)
    assert found == pick(64, 8, 8, BF16, "nt", False)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_the_preference_for_the_library_follows_its_winner(winners, layout):
    work = library_work(layout, BF16, FP32, 4096, 1024, 1024)
    arguments = 4096, 1024, 1024, BF16, layout, FP32
    rule = prefers_library(*arguments)
    for name, preferred in ((LIBRARY, True), (TRITON, False)):
        winners(work, name)
        assert prefers_library(*arguments, CPU) is preferred
        assert prefers_library(*arguments) is rule
    winners(work, "cublas with split K")
    with pytest.warns(UserWarning, match="is no schedule of this op"):
        assert prefers_library(*arguments, CPU) is rule


@pytest.mark.parametrize("rows", [1, 4096])
def test_no_winner_makes_the_library_take_what_no_certificate_covers(winners, rows):
    dtype = BF16 if rows == 1 else FP32
    winners(library_work("nt", dtype, dtype, rows, 8, 8), LIBRARY)
    assert not prefers_library(rows, 8, 8, dtype, "nt", dtype, CPU)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_fused_launches_take_their_winners(winners, dtype):
    columns, k = (64, 32, 32), 128
    rule = pick_qkv(16, dtype)
    winner = other_than(rule, few_rows_candidates(QKV, dtype, tma=False))
    winners(qkv_work(dtype, 16, columns, k), winner.name)
    assert pick_qkv(9, dtype, columns, k, CPU) == winner
    assert pick_qkv(9, dtype, columns, k) == pick_qkv(9, dtype, (64, 32, 16), k, CPU) == rule
    rule = pick_gate_up(16, 64, dtype, True)
    winner = other_than(rule, few_rows_candidates(GATE_UP, dtype, tma=True))
    winners(gate_up_work(dtype, True, 16, 64, k), winner.name)
    assert pick_gate_up(16, 64, dtype, True, k, CPU) == winner
    assert pick_gate_up(16, 64, dtype, True, k) == rule


@pytest.mark.parametrize(("dtype", "tma"), [(BF16, True), (BF16, False), (FP32, True)])
def test_a_gradient_takes_its_winner(winners, dtype, tma):
    sizes = 4096, 1024, 3072

    def picked(device):
        return fold_schedules.pick(*sizes, dtype, tma=tma, processors=132, device=device)

    winner = other_than(picked(None), fold_schedules.candidates(dtype, tma=tma))
    name = winners_module.schedule_name(winner)
    winners(fold_work(*sizes, dtype, tma=tma), name)
    assert picked(CPU) == winner != picked(None)


@pytest.mark.parametrize("m", [1, 16, 32, 64, 128, 1024, 4096, 16384])
def test_candidates_are_schedules_of_the_pick_and_few(m):
    for dtype, tma, table in (
        (BF16, True, CANDIDATES), (BF16, False, POINTER), (FP32, True, POINTER_FP32),
    ):  # fmt: skip
        found = candidates(m, dtype, tma=tma)
        assert found and set(found) <= set(table) and len(set(found)) == len(found)
    described = candidates(m, BF16, tma=True)
    assert len(described) >= 5
    assert all(s.block_m <= max(32, 4 * m) for s in described)
    # What runs without a winner is timed too, so no winner is worse.
    assert all(
        pick(m, n, k, BF16, "nt", True) in described for n in (576, 4096) for k in (64, 8192)
    )
