"""Which schedules the experts get: the rule, and winners of `tune`."""

import torch

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings, Winner, forget_picks
from rl_consistency.kernels.experts.schedules import (
    fold_candidates,
    fold_work,
    most_tiles,
    pick_fold,
    pick_product,
    product_candidates,
    product_work,
)

CPU = torch.device("cpu")


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
