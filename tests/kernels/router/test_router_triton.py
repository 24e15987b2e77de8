import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.experts.route import (
    ALL,
    candidates,
    choose,
    choose_fwd,
    logit_gradients,
    logits_bwd,
    pick,
)
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

ROWS, TOP_K = 11, 4


def tied(experts):
    """Logits with many equal ones, zeros of both signs among them."""
    logits = (probe((ROWS, experts)) * 0.25).round()
    logits[1] = torch.where(torch.arange(experts) % 2 == 0, 0.0, -0.0)
    return logits


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("experts", [8, 12, 128])
@pytest.mark.parametrize("normalize", [True, False])
def test_every_schedule_chooses_as_on_a_cpu(schedule, experts, normalize):
    for logits in (probe((ROWS, experts)), tied(experts)):
        expected_ids, expected, expected_p = choose(logits, TOP_K, normalize)
        ids, weights, p = choose_fwd(logits, TOP_K, normalize, schedule)
        assert torch.equal(ids, expected_ids)
        assert_within(weights, expected, "elementwise", torch.float32)
        if not normalize:
            assert_within(p, expected_p, "elementwise", torch.float32)


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_every_schedule_has_the_gradients_of_a_cpu(schedule, normalize):
    dweights = probe((ROWS, TOP_K), seed=2)
    ids, weights, p = choose(probe((ROWS, 12)), TOP_K, normalize)
    p = None if normalize else p
    for dtype in (torch.float32, torch.bfloat16):
        expected = logit_gradients(dweights, ids, weights, p, 12, dtype)
        ours = logits_bwd(dweights, ids, weights, p, 12, dtype, schedule)
        assert ours.dtype == dtype
        assert_within(ours, expected, "elementwise", dtype)


def test_no_schedule_holds_so_much_that_it_takes_minutes_to_compile():
    for block in (2, 8, 64, 128, 256, 512, 1024, 2048, 4096):
        held = {s: s.rows * block / (32 * s.warps) for s in candidates(block)}
        assert held and max(held.values()) <= 32
        assert all(pick(rows, block) in held for rows in (1, 512, 513, 1 << 17))


def test_a_logit_that_is_not_finite_fails_its_row_alone():
    logits = probe((6, 12))
    _, expected, _ = choose_fwd(logits, TOP_K, True)
    for row, value in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        logits[row, 5] = value
    logits[5] = -torch.inf
    ids, weights, _ = choose_fwd(logits, TOP_K, True)
    assert weights[[1, 3, 4, 5]].isnan().all()
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert int(ids.min()) >= 0 and int(ids.max()) < 12
    assert same_bytes(weights[[0, 2]], expected[[0, 2]])


def test_no_rows_give_no_rows():
    ids, weights, p = choose_fwd(torch.zeros(0, 8), 2, False)
    assert ids.shape == weights.shape == (0, 2) and p.shape == (0, 8)
    assert logits_bwd(weights, ids, weights, p, 8, torch.bfloat16).shape == (0, 8)
