import pytest
import torch

from rl_consistency.kernels.pointwise import glu as pointwise_glu
from rl_consistency.kernels.pointwise.glu import (
    glu,
    glu_fwd,
)
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.glu.test_glu import (
    clamped,
    test_extreme_gates_stay_finite_in_the_kernels,  # noqa: F401
    test_infinite_gates_and_nan_are_those_of_torch,  # noqa: F401
    test_the_gradients_kernel_gives_the_values_too,  # noqa: F401
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return "cuda"


@pytest.mark.large
def test_offsets_past_two_to_the_31(device):
    gate, up, _ = (x.flatten() for x in clamped(torch.bfloat16, device))
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
