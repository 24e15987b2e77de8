import pytest
import torch
import torch.nn.functional as F

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.glu import activation_triton
from rl_consistency.kernels.glu.activation_triton import CANDIDATES, SCHEDULE, glu_bwd, glu_fwd
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu, glu_reference
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT, assert_within
from rl_consistency.verify.laws import judged, rows_of, schedules_alike

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE = (137, 1000)
STOCK = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def operands(dtype, seed=0):
    """gate, up, dy."""
    gate, up, dy = (probe(SHAPE, dtype, seed=seed + s).clamp(-64, 64).cuda() for s in range(3))
    # Three outliers multiplied together must fit fp16.
    return gate, up / 32, dy / 32


def both_ways(op, gate, up, dy):
    leaves = [x.detach().clone().requires_grad_() for x in (gate, up)]
    y = op(*leaves)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_fp64_and_is_as_accurate_as_stock(activation, dtype):
    errors = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(4):
        rows = operands(dtype, 10 * seed)
        wide = [x.double() for x in rows]
        exact = both_ways(lambda g, u: glu_reference(g, u, activation), *wide)
        ours = both_ways(lambda g, u: glu(g, u, activation), *rows)
        stock = both_ways(lambda g, u: STOCK[activation](g) * u, *rows)
        for i, (a, b, c) in enumerate(zip(ours, stock, exact, strict=True)):
            assert_within(a, c, "elementwise", dtype, gradient=i > 0)
            scale = c.square().mean(0).sqrt()
            for side, found in enumerate((a, b)):
                errors[side, i] += ((found.double() - c) / scale).abs().mean().cpu()
    assert (errors[0] <= ERROR_GROWTH_LIMIT * errors[1]).all(), errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_do_not_depend_on_where_they_stand(activation, dtype):
    gate, up, dy = (x.flatten() for x in operands(dtype))

    def op(*rows):
        return torch.stack(both_ways(lambda g, u: glu(g, u, activation), *rows), dim=-1)

    whole = op(gate, up, dy)
    for start in (0, 1, 3, 8, 500, 1023):
        for length in (1, 2, 7, 9, 31, 33, 1000, 1024, 100000):
            s = slice(start, start + length)
            assert same_bytes(op(gate[s], up[s], dy[s]), whole[s]), (start, length)


@pytest.mark.parametrize("activation, dtype", zip(ACTIVATIONS, DTYPES, strict=True))
def test_every_schedule_gives_the_same_bytes(activation, dtype):
    gate, up, dy = operands(dtype)
    forward = lambda schedule: glu_fwd(gate, up, activation, schedule)  # noqa: E731
    backward = lambda schedule: rows_of(*glu_bwd(dy, gate, up, activation, schedule))  # noqa: E731
    assert judged(schedules_alike, "y", [SCHEDULE, *CANDIDATES], forward).passed
    assert judged(schedules_alike, "gradients", [SCHEDULE, *CANDIDATES], backward).passed


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradients_kernel_gives_the_values_too(activation, dtype):
    gate, up, dy = operands(dtype)
    for schedule in (None, *CANDIDATES):
        *gradients, y = glu_bwd(dy, gate, up, activation, schedule, gives_y=True)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype):
    rows = operands(dtype)
    strided = [x.t().contiguous().t() for x in rows]
    assert all(map(same_bytes, both_ways(glu, *strided), both_ways(glu, *rows)))


def test_compiled_and_captured_equal_eager():
    rows = operands(torch.bfloat16)
    expected = both_ways(glu, *rows)
    compiled = torch.compile(glu, fullgraph=True)
    assert all(map(same_bytes, both_ways(compiled, *rows), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = glu(*rows[:2])
    graph.replay()
    assert same_bytes(y, expected[0])


@pytest.mark.large
def test_offsets_past_two_to_the_31():
    gate, up, _ = (x.flatten() for x in operands(torch.bfloat16))
    rows = torch.zeros(2, 2**31 + len(gate), dtype=torch.bfloat16, device="cuda")
    rows[0, -len(gate) :], rows[1, -len(gate) :] = gate, up
    assert same_bytes(glu(*rows)[-len(gate) :], glu(gate, up))


def test_nothing_gives_nothing():
    nothing = torch.zeros(0, 5, device="cuda")
    assert glu(nothing, nothing).shape == (0, 5)


def test_bad_operands_are_refused():
    gate, up, _ = operands(torch.bfloat16)
    with pytest.raises(ValueError, match="up is on cpu but gate is on cuda"):
        glu(gate, up.cpu())
    with pytest.raises(ValueError, match="activation 'relu'; allowed: silu, gelu, gelu_tanh"):
        glu(gate, up, "relu")


def test_stock_rounding_fails_the_same_check():
    gate, up, _ = operands(torch.bfloat16)
    assert not same_bytes(F.silu(gate) * up, glu(gate, up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_remembered_launch_gives_the_bytes_of_one_specialised_anew(dtype, monkeypatch):
    memory = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    sizes = (1, 2, 16, 17, 1000, 4096, 4097)
    cases = [memory[:, start : start + size] for start in (0, 1, 8, 128) for size in sizes]
    got = [[glu_fwd(*case, "silu") for _ in range(3)] for case in cases]
    kernel = activation_triton._forward_kernel
    assert kernel._compiled
    monkeypatch.setattr(activation_triton, "_forward_kernel", kernel.kernel)
    for found, case in zip(got, cases, strict=True):
        assert all(same_bytes(y, glu_fwd(*case, "silu")) for y in found)
