"""Expert products by a winner of `tune` are audited, and struck where they differ."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core.cache import tuned_schedules
from rl_consistency.kernels.core.cache.tuned_schedules import TunedSchedules, Winner, forget_picks
from rl_consistency.kernels.experts import cuda
from rl_consistency.kernels.experts.schedules import (
    BY_PAIRS,
    FEW,
    GATE_UP,
    MOST_FEW,
    PRODUCTS,
    few_work,
    product_work,
)
from rl_consistency.kernels.experts.winner_audit import pairs_of
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.audit import schedule_audit
from rl_consistency.kernels.router.op import route
from tests.kernels.experts.cases import parameters

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

CPU = torch.device("cpu")
EXPERTS, HIDDEN, WIDTH, ROWS, TOP_K = 4, 32, 24, 20, 2


@pytest.fixture
def store(monkeypatch):
    """No winners yet; every call is audited."""
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    monkeypatch.setattr(audit, "AUDIT_EVERY", 1)
    found = TunedSchedules(None, {})
    monkeypatch.setitem(tuned_schedules._by_device, CPU, found)
    forget_picks()
    yield found
    forget_picks()


def forward(rows=ROWS):
    """One call; rows 12 to 19 are filler, whose pairs hold anything. Few rows are not recorded."""
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH}
    router, gate_up, down = (w.detach() for w in parameters(torch.bfloat16, **sizes))
    x = probe((rows, HIDDEN), torch.bfloat16, scale=0.1)
    ids, weights = route(x, router, TOP_K, normalize=True)
    layout = PackedSequences.of([0], [min(rows, 12)])
    return cuda.experts_fwd(x, ids, weights, gate_up, down, layout, "silu", rows == ROWS)


def works():
    """Those of the call's two products."""
    sizes = {"gate_up": (WIDTH, HIDDEN), "nt": (HIDDEN, WIDTH)}
    return {
        product_work(product, torch.bfloat16, False, ROWS * TOP_K, EXPERTS, *nk)
        for product, nk in sizes.items()
    }


def test_products_without_a_winner_are_not_audited(store):
    forward()
    assert schedule_audit().calls == 0


def test_winners_are_audited_and_equal_ones_stay(store):
    for work in works():
        table = PRODUCTS if "/nt/" in work else GATE_UP
        store.keep(work, Winner(table[1].name, 1.0, 2.0))
    forward()
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing) == (2, 2, 0) and report.struck == []


def test_a_winner_of_other_bytes_is_struck(store, monkeypatch):
    (work,) = (name for name in works() if "/nt/" in name)
    store.keep(work, Winner(PRODUCTS[1].name, 1.0, 2.0))
    own = cuda.expert_product_op
    monkeypatch.setattr(cuda, "expert_product_op", lambda *a: own(*a) * 1.01)
    forward()
    report = schedule_audit()
    assert report.found > 0 and report.struck == [f"{work}: {PRODUCTS[1].name}"]
    forward()
    assert schedule_audit().calls == 1


FEW_WORK = few_work(torch.bfloat16, TOP_K, EXPERTS, HIDDEN, WIDTH)


def test_one_row_by_a_winner_is_audited_and_an_equal_one_stays(store):
    forward(1)
    assert schedule_audit().calls == 0
    store.keep(FEW_WORK, Winner(FEW[1].name, 1.0, 2.0))
    forward(1)
    report = schedule_audit()
    assert (report.calls, report.audited, report.differing) == (1, 1, 0) and report.struck == []
    forward(2)
    assert schedule_audit().calls == 1


def test_a_winner_of_one_row_with_other_bytes_is_struck(store, monkeypatch):
    store.keep(FEW_WORK, Winner(FEW[1].name, 1.0, 2.0))
    own = cuda.expert_few_rows_op
    monkeypatch.setattr(cuda, "expert_few_rows_op", lambda *a: own(*a) * 1.01)
    forward(1)
    report = schedule_audit()
    assert report.found > 0 and report.struck == [f"{FEW_WORK}: {FEW[1].name}"]
    forward(1)
    assert schedule_audit().calls == 1


def test_pairs_may_win_at_one_row_and_are_found_from_some_rows_on(store):
    assert forward(1)[2] is None and forward(MOST_FEW)[2] is None
    assert forward(MOST_FEW + 1)[2] is not None
    store.keep(FEW_WORK, Winner(BY_PAIRS, 1.0, 2.0))
    assert forward(1)[2] is not None and forward(MOST_FEW)[2] is None


def test_what_stands_past_the_last_pair_is_not_compared():
    x = torch.full((4, 2), torch.nan)
    x[:3] = 1.0
    found = pairs_of(x, torch.tensor([0, 1, 3]))
    assert found[:3].eq(1).all() and found[3].eq(0).all()
