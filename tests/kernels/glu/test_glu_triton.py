import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.glu import (
    ACTIVATIONS,
    glu_bwd,
    glu_bwd_op,
    glu_fwd,
    glu_fwd_op,
    glu_reference,
)
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within

SHAPE = (37, 51)
DTYPES = [torch.float32, torch.bfloat16]


def operands(dtype=torch.float32):
    return tuple(probe(SHAPE, dtype, seed=s).clamp(-64, 64) for s in range(3))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_fp64(activation, dtype):
    gate, up, _ = operands(dtype)
    ours = glu_fwd(gate, up, activation)
    assert_within(ours, glu_reference(gate, up, activation), "elementwise", dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_stay_finite(activation):
    gate = torch.tensor([-3e38, -1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4, 3e38])
    y = glu_fwd(gate, torch.ones(9), activation)
    assert torch.allclose(y, gate.clamp(min=0.0), atol=1e-30)
    dgate, dup = glu_bwd(torch.ones(7), gate[1:-1], torch.ones(7), activation)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    assert torch.allclose(dgate, expected, atol=1e-30)
    assert same_bytes(dup + 0.0, y[1:-1] + 0.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_infinite_gates_and_nan_are_those_of_torch():
    gate = torch.tensor([float("inf"), float("-inf"), float("nan")])
    y = glu_fwd(gate, torch.ones(3), "silu")
    assert torch.equal(y.isnan(), torch.tensor([False, True, True])) and y[0] == float("inf")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradients_kernel_gives_the_values_too(activation):
    gate, up, dy = operands()
    *gradients, y = glu_bwd(dy, gate, up, activation, gives_y=True)
    assert same_bytes(y, glu_fwd(gate, up, activation))
    assert all(map(same_bytes, gradients, glu_bwd(dy, gate, up, activation)))


def test_strides_do_not_matter():
    gate, up, dy = operands()
    strided = [t.t().contiguous().t() for t in (gate, up, dy)]
    assert same_bytes(glu_fwd(*strided[:2], "silu"), glu_fwd(gate, up, "silu"))
    found = glu_bwd(strided[2], *strided[:2], "silu")
    assert all(map(same_bytes, found, glu_bwd(dy, gate, up, "silu")))


def test_the_ops_of_a_compiler_give_the_bytes_of_the_launchers():
    gate, up, dy = operands()
    assert same_bytes(glu_fwd_op(gate, up, "gelu"), glu_fwd(gate, up, "gelu"))
    expected = glu_bwd(dy, gate, up, "gelu")
    assert all(map(same_bytes, glu_bwd_op(dy, gate, up, "gelu", False), expected))
    torch.library.opcheck(
        torch.ops.rl_consistency.glu_fwd_op.default,
        (gate, up, "silu"),
        test_utils="test_faketensor",
    )
