import pytest
import torch
import torch.nn.functional as F

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu, glu_gradients, glu_reference
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within

SHAPE = (37, 51)


def operands(dtype=torch.float32):
    return probe(SHAPE, dtype), probe(SHAPE, dtype, seed=1)


def differing_calls(op, gate, up):
    """Calls on spans of the flattened operands whose result differs from the whole's."""
    gate, up = gate.flatten(), up.flatten()
    whole = op(gate, up)
    spans = [slice(i, i + n) for i in (0, 1, 3, 8, 500) for n in (1, 2, 7, 9, 31, 33, 1000)]
    return sum(not same_bytes(op(gate[s], up[s]), whole[s]) for s in spans)


def gradients(gate, up, activation):
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    # The cotangent of a value is a function of its own gate, so that it moves with the value.
    glu(*leaves, activation).backward(gate * 0.5 + 1.0)
    return torch.stack([leaf.grad for leaf in leaves], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_fp64(activation, dtype):
    gate, up = operands(dtype)
    up = up.clamp(-64, 64)
    ours = glu(gate.clamp(-64, 64), up, activation)
    exact = glu_reference(gate.clamp(-64, 64), up, activation)
    assert_within(ours, exact, "elementwise", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_match_fp64(activation, dtype):
    leaves = [t.requires_grad_() for t in operands(dtype)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dy = probe(SHAPE, dtype, seed=3)
    glu(*leaves, activation).backward(dy)
    glu_reference(*exact, activation).backward(dy.double())
    for ours, reference in zip(leaves, exact, strict=True):
        assert_within(ours.grad, reference.grad, "elementwise", dtype, gradient=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_stay_finite(activation):
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4], requires_grad=True)
    y = glu(gate, torch.ones(7), activation)
    y.sum().backward()
    assert torch.allclose(y, gate.detach().clamp(min=0.0), atol=1e-30)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    assert torch.allclose(gate.grad, expected, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_do_not_depend_on_where_they_stand(activation, dtype):
    gate, up = operands(dtype)
    assert differing_calls(lambda g, u: glu(g, u, activation), gate, up) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_do_not_depend_on_where_they_stand(activation, dtype):
    gate, up = operands(dtype)
    assert differing_calls(lambda g, u: gradients(g, u, activation), gate, up) == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_strides_do_not_matter(activation):
    gate, up = operands()
    strided = [t.t().contiguous().t() for t in (gate, up)]
    assert same_bytes(glu(*strided, activation), glu(gate, up, activation))


def test_nothing_gives_nothing():
    assert glu(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)


def test_bad_operands_are_refused():
    gate, up = operands()
    with pytest.raises(ValueError, match="activation 'relu'; allowed: silu, gelu, gelu_tanh"):
        glu(gate, up, "relu")
    with pytest.raises(ValueError, match=r"gate \(37, 51\) and up \(36, 51\) must be equal"):
        glu(gate, up[1:])
    with pytest.raises(TypeError, match="up is torch.bfloat16"):
        glu(gate, up.bfloat16())


@pytest.mark.parametrize(
    "stock", [F.silu, lambda x: F.gelu(x, approximate="tanh")], ids=["silu", "gelu_tanh"]
)
def test_stock_activation_fails_the_same_check(stock):
    """Measured: torch computes the tail of a tensor by another formula than its vector body."""
    gate, up = operands()
    assert differing_calls(lambda g, u: stock(g) * u, gate, up) > 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_an_unrounded_dy_are_rounded_once(activation):
    gate, up, dy = (probe((9, 40), torch.bfloat16, seed=i, scale=0.1) for i in range(3))
    dy = dy.float() * 1.2345
    exact = [t.double().requires_grad_() for t in (gate, up)]
    glu_reference(*exact, activation).backward(dy.double())
    for ours, leaf in zip(glu_gradients(dy, gate, up, activation), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_within(ours, leaf.grad, "elementwise", torch.bfloat16)
    rounded = glu_gradients(dy.bfloat16(), gate, up, activation)
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    glu(*leaves, activation).backward(dy.bfloat16())
    assert all(same_bytes(a, b.grad) for a, b in zip(rounded, leaves, strict=True))
