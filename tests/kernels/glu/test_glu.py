import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.pointwise.glu import (
    ACTIVATIONS,
    CANDIDATES,
    glu,
    glu_bwd,
    glu_fwd,
    glu_gradients,
    glu_reference,
)
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within

SHAPE = (37, 51)


@pytest.fixture
def device():
    return "cpu"


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


# The kernels, in Triton's interpreter.


def clamped(dtype=torch.float32, device="cpu"):
    """gate, up and dy: three outliers multiplied together fit fp16."""
    gate, *others = (probe(SHAPE, dtype, seed=s).clamp(-64, 64).to(device) for s in range(3))
    return gate, *(x / 32 for x in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_matches_fp64(activation, dtype):
    gate, up, _ = clamped(dtype)
    ours = glu_fwd(gate, up, activation)
    assert_within(ours, glu_reference(gate, up, activation), "elementwise", dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_stay_finite_in_the_kernels(activation, device):
    gate = torch.tensor([-3e38, -1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4, 3e38], device=device)
    ones = torch.ones_like(gate)
    y = glu_fwd(gate, ones, activation)
    assert torch.allclose(y, gate.clamp(min=0.0), atol=1e-30)
    dgate, dup = glu_bwd(ones[1:-1], gate[1:-1], ones[1:-1], activation)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], device=device)
    assert torch.allclose(dgate, expected, atol=1e-30)
    assert same_bytes(dup + 0.0, y[1:-1] + 0.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_infinite_gates_and_nan_are_those_of_torch(device):
    gate = torch.tensor([float("inf"), float("-inf"), float("nan")], device=device)
    y = glu_fwd(gate, torch.ones_like(gate), "silu")
    assert y.isnan().tolist() == [False, True, True] and y[0] == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradients_kernel_gives_the_values_too(activation, dtype, device):
    gate, up, dy = clamped(dtype, device)
    for schedule in (None, *CANDIDATES):
        *gradients, y = glu_bwd(dy, gate, up, activation, True, schedule)
        assert same_bytes(y, glu_fwd(gate, up, activation))
        assert all(map(same_bytes, gradients, glu_bwd(dy, gate, up, activation)))
