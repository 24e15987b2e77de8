import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu, glu_gradients, glu_reference
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within

SHAPE = (37, 51)


def operands(dtype=torch.float32):
    return probe(SHAPE, dtype), probe(SHAPE, dtype, seed=1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_stay_finite(activation):
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4], requires_grad=True)
    y = glu(gate, torch.ones(7), activation)
    y.sum().backward()
    assert torch.allclose(y, gate.detach().clamp(min=0.0), atol=1e-30)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    assert torch.allclose(gate.grad, expected, atol=1e-30)


def test_bad_operands_are_refused():
    gate, up = operands()
    with pytest.raises(ValueError, match="activation 'relu'; allowed: silu, gelu, gelu_tanh"):
        glu(gate, up, "relu")
    with pytest.raises(ValueError, match=r"gate \(37, 51\) and up \(36, 51\) must be equal"):
        glu(gate, up[1:])
    with pytest.raises(TypeError, match="up is torch.bfloat16"):
        glu(gate, up.bfloat16())


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
