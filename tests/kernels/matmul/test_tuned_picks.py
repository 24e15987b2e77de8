"""Picks ask for a winner first, take only schedules of their own, and fall back to the rule."""

import pytest
import torch

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Winner, findings_of, forget_picks
from rl_consistency.kernels.matmul.schedules import (
    CANDIDATES,
    POINTER,
    POINTER_FP32,
    candidates,
    pick,
    product_work,
)

BF16, FP32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")


@pytest.fixture(autouse=True)
def winners(monkeypatch):
    """Keeps a winner of this test."""
    monkeypatch.setattr(findings_module, "_by_device", {})
    forget_picks()
    yield lambda work, name: findings_of(CPU).keep(work, Winner(name, 1.0, 2.0))
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
    work = product_work(layout, dtype, dtype, kind, 100, 1024, 4096)
    findings_of(CPU).withdraw(f"{work}: {winner.name}", "differs")
    assert picked(100) == rule


def test_a_pointer_product_never_takes_a_descriptor_schedule(winners):
    """The mutant: a poisoned entry names what its operands do not admit."""
    winners(product_work("nt", BF16, BF16, False, 64, 8, 8), CANDIDATES[0].name)
    with pytest.warns(UserWarning, match="is no schedule of this op"):
        found = pick(64, 8, 8, BF16, "nt", False, BF16, CPU)
    assert found == pick(64, 8, 8, BF16, "nt", False)


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
