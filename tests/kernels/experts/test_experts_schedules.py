"""Which schedules the experts get: the rule, and winners of `tune`."""

import itertools

import torch

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings, Winner, forget_picks
from rl_consistency.kernels.experts.products_triton import MOST_STEPS
from rl_consistency.kernels.experts.schedules import (
    BLOCK_STEPS,
    COMBINE,
    block_experts,
    fold_candidates,
    fold_work,
    most_tiles,
    pair_candidates,
    pick_combine,
    pick_fold,
    pick_pair,
    pick_product,
    product_candidates,
    product_work,
)

CPU = torch.device("cpu")


def test_picks_are_in_their_tables():
    for dtype in (torch.float32, torch.bfloat16):
        for pairs in (1, 64, 2048, 1 << 17):
            for product, tma in itertools.product(("gate_up", "nt", "nn"), (False, True)):
                table = product_candidates(product, dtype, tma=tma)
                own = pick_product(product, pairs, 128, 768, 2048, dtype, tma)
                assert own in table
                assert (own.kind == "tma") == (tma and dtype != torch.float32)
                assert own.kind != "tma" or max(own.short.block_k, own.tall.block_k) <= MOST_STEPS
            for tma in (False, True):
                own = pick_fold(pairs, 128, 768, 2048, dtype, tma=tma, processors=132)
                assert own in fold_candidates(dtype, tma=tma)
                assert (own.kind == "tma") == (tma and dtype != torch.float32)
                assert own.block_t <= BLOCK_STEPS
    few, many = (
        pick_product("nt", pairs, 128, 768, 2048, torch.bfloat16, False) for pairs in (8, 1 << 17)
    )
    assert (few.short.block_m, few.tall.block_m, many.short.block_m) == (16, 64, 128)
    assert all(pick_combine(r, h) in COMBINE for r in (1, 4096) for h in (64, 4096))
    for width in (24, 768, 1024, 1025, 14336, 40_000):
        held = {s: block_experts(width) / (32 * s.warps) for s in pair_candidates(width)}
        assert pick_pair(width) in held
        assert max(held.values()) <= 32 or (width == 40_000 and len(held) == 1)
    assert [pick_pair(width).warps for width in (768, 1024, 1025, 14336)] == [1, 1, 4, 16]


def test_a_winner_of_tune_goes_before_the_rule(monkeypatch):
    store = Findings(None, {})
    monkeypatch.setitem(findings_module._by_device, CPU, store)
    sizes = 2048, 128, 768, 2048
    for product in ("gate_up", "nt", "nn"):
        last = product_candidates(product, torch.bfloat16, tma=True)[-1]
        work = product_work(product, torch.bfloat16, True, *sizes)
        store.keep(work, Winner(last.name, 1.0, 2.0))
        assert pick_product(product, *sizes, torch.bfloat16, True, CPU) == last
    last = fold_candidates(torch.bfloat16, tma=True)[-1]
    store.keep(fold_work(torch.bfloat16, True, *sizes), Winner(last.name, 1.0, 2.0))
    assert pick_fold(*sizes, torch.bfloat16, tma=True, processors=132, device=CPU) == last
    forget_picks()


def test_most_tiles_hold_every_routing():
    for counts in ([0, 0, 64], [1, 1, 62], [17, 16, 31], [64, 0, 0]):
        tiles = sum(-(-c // 16) for c in counts)
        assert tiles <= most_tiles(64, 64, 3, 16)
    assert most_tiles(3, 1, 128, 16) == 3
    assert most_tiles(16 * 8, 16, 20, 16) == 20  # no expert has a second tile
    assert most_tiles(17 * 8, 17, 20, 16) == 28
