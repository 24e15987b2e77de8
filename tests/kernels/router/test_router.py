import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.experts import route as op
from rl_consistency.kernels.experts.route import (
    choose,
    logit_gradients,
    route_reference,
    route_with_logits,
)
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within

ROWS, HIDDEN, EXPERTS, TOP_K = 80, 96, 12, 4


def operands(dtype=torch.float32):
    x = probe((ROWS, HIDDEN), dtype, scale=0.25)
    return x, probe((EXPERTS, HIDDEN), dtype, seed=1, scale=HIDDEN**-0.5)


def tied_logits():
    """Equal values at the k-th place, zeros of both signs, and rows of one value."""
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 3.0, 2.0, 3.0],
            [0.0, -0.0, -1.0, 0.0, -0.0, -1.0],
            [5.0, 5.0, 5.0, 5.0, 5.0, 5.0],
            [1.0, 1.0, 2.0, 1.0, 2.0, 0.0],
        ]
    )
    return logits, [[1, 2, 3], [0, 1, 3], [0, 1, 2], [0, 2, 4]]


def test_equal_logits_go_to_the_lower_id():
    logits, expected = tied_logits()
    assert choose(logits, 3, True)[0].tolist() == expected


def test_equal_experts_go_to_the_lower_id():
    x, weight = operands()
    weight[7] = weight[2]
    weight[5] = weight[1]
    ids, *_ = route_with_logits(x, weight, TOP_K, normalize=True)
    for low, high in ((2, 7), (1, 5)):
        has_low, has_high = ((ids == e).any(dim=-1) for e in (low, high))
        assert bool((has_low | ~has_high).all()) and bool((has_low & ~has_high).any())


def test_a_logit_that_is_not_finite_fails_its_row_alone():
    logits = probe((6, EXPERTS))
    expected_ids, expected, _ = choose(logits, TOP_K, True)
    for row, value in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        logits[row, 5] = value
    ids, weights, _ = choose(logits, TOP_K, True)
    assert weights[[1, 3, 4]].isnan().all()
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert int(ids.min()) >= 0 and int(ids.max()) < EXPERTS
    kept = [0, 2, 5]
    assert torch.equal(ids[kept], expected_ids[kept])
    assert same_bytes(weights[kept], expected[kept])


@pytest.mark.parametrize("top_k", [1, EXPERTS])
def test_one_expert_and_all_experts(top_k):
    x, weight = (t.requires_grad_() for t in operands())
    ids, weights, _ = route_with_logits(x, weight, top_k, normalize=True)
    if top_k == 1:
        assert bool((weights == 1).all())
    else:
        assert torch.equal(ids, torch.arange(EXPERTS, dtype=torch.int32).expand(ROWS, EXPERTS))
    weights.sum().backward()
    assert torch.allclose(x.grad, torch.zeros_like(x), atol=1e-5)


def test_weights_without_a_gradient_give_zeros():
    x, weight = (t.requires_grad_() for t in operands())
    ids, weights, _ = route_with_logits(x, weight, TOP_K, normalize=True)
    assert not ids.requires_grad and weights.requires_grad
    (weights * 0).sum().backward()
    assert not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_those_of_the_choice_and_have_gradients_of_their_own(dtype):
    x, weight = operands(dtype)
    dweights, dlogits = (probe((ROWS, n), seed=n, scale=0.02) for n in (TOP_K, EXPERTS))

    def gradients(through_weights, through_logits, f=route_with_logits, dtype=dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight)]
        _, weights, logits = f(*leaves, TOP_K, normalize=True)
        given = [(weights, dweights)] * through_weights + [(logits, dlogits)] * through_logits
        torch.autograd.backward(*map(list, zip(*given, strict=True)))
        return [leaf.grad for leaf in leaves]

    def exact(x, weight, top_k, *, normalize):
        return *route_reference(x, weight, top_k, normalize=normalize), x @ weight.t()

    ids, weights, logits = route_with_logits(x, weight, TOP_K, normalize=True)
    assert same_bytes(logits, op.matmul_nt(x, weight))
    alone = route_with_logits(x, weight, TOP_K, normalize=True)
    assert same_bytes(alone[0], ids) and same_bytes(alone[1], weights)
    for which in ((1, 0), (0, 1), (1, 1)):
        reference = gradients(*which, exact, torch.float64)
        for ours, wanted in zip(gradients(*which), reference, strict=True):
            assert_within(ours, wanted, "reduction", dtype, gradient=True)


def test_the_gradient_of_logits_is_that_of_softmax():
    logits = probe((9, EXPERTS)).requires_grad_()
    dweights = probe((9, TOP_K), seed=1)
    for normalize in (True, False):
        ids, weights, p = choose(logits.detach(), TOP_K, normalize)
        ours = logit_gradients(
            dweights, ids, weights, None if normalize else p, EXPERTS, torch.float32
        )
        exact = logits.detach().double().requires_grad_()
        chosen = exact.softmax(-1).gather(1, ids.long())
        if normalize:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        chosen.backward(dweights.double())
        assert_within(ours, exact.grad, "reduction", torch.float32, gradient=True)


def test_bad_operands_are_refused():
    x, weight = operands()
    with pytest.raises(ValueError, match=r"router: x \(80, 95\) does not fit weight \(12, 96\)"):
        route_with_logits(x[:, 1:], weight, TOP_K, normalize=True)
    for top_k in (0, EXPERTS + 1):
        with pytest.raises(ValueError, match=f"top_k {top_k}; 1 to 12"):
            route_with_logits(x, weight, top_k, normalize=True)
    with pytest.raises(TypeError, match="weight is torch.bfloat16"):
        route_with_logits(x, weight.bfloat16(), TOP_K, normalize=True)
