import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise import glu as pointwise_glu
from rl_consistency.kernels.pointwise.glu import (
    ACTIVATIONS,
    CANDIDATES,
    glu,
    glu_bwd,
    glu_fwd,
)
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE = (137, 1000)


def operands(dtype, seed=0):
    """gate, up, dy."""
    gate, up, dy = (probe(SHAPE, dtype, seed=seed + s).clamp(-64, 64).cuda() for s in range(3))
    # Three outliers multiplied together must fit fp16.
    return gate, up / 32, dy / 32


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradients_kernel_gives_the_values_too(activation, dtype):
    gate, up, dy = operands(dtype)
    for schedule in (None, *CANDIDATES):
        *gradients, y = glu_bwd(dy, gate, up, activation, True, schedule)
        assert same_bytes(y, glu_fwd(gate, up, activation))
        assert all(map(same_bytes, gradients, glu_bwd(dy, gate, up, activation)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_stay_finite(activation):
    gate = torch.tensor([-3e38, -1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4, 3e38], device="cuda")
    y = glu(gate, torch.ones_like(gate), activation)
    assert torch.allclose(y, gate.clamp(min=0.0), atol=1e-30)
    leaf = gate[1:-1].clone().requires_grad_()
    glu(leaf, torch.ones_like(leaf), activation).sum().backward()
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], device="cuda")
    assert torch.allclose(leaf.grad, expected, atol=1e-30)


def test_infinite_gates_and_nan_are_those_of_torch():
    gate = torch.tensor([float("inf"), float("-inf"), float("nan")], device="cuda")
    y = glu(gate, torch.ones_like(gate))
    assert y.isnan().tolist() == [False, True, True] and y[0] == float("inf")


@pytest.mark.large
def test_offsets_past_two_to_the_31():
    gate, up, _ = (x.flatten() for x in operands(torch.bfloat16))
    rows = torch.zeros(2, 2**31 + len(gate), dtype=torch.bfloat16, device="cuda")
    rows[0, -len(gate) :], rows[1, -len(gate) :] = gate, up
    assert same_bytes(glu(*rows)[-len(gate) :], glu(gate, up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_remembered_launch_gives_the_bytes_of_one_specialised_anew(dtype, monkeypatch):
    memory = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    sizes = (1, 2, 16, 17, 1000, 4096, 4097)
    cases = [memory[:, start : start + size] for start in (0, 1, 8, 128) for size in sizes]
    got = [[glu_fwd(*case, "silu") for _ in range(3)] for case in cases]
    kernel = pointwise_glu._forward_kernel
    assert kernel._compiled
    monkeypatch.setattr(pointwise_glu, "_forward_kernel", kernel.kernel)
    for found, case in zip(got, cases, strict=True):
        assert all(same_bytes(y, glu_fwd(*case, "silu")) for y in found)
