import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.rms_norm.backward_triton import rms_norm_bwd
from rl_consistency.kernels.rms_norm.forward_triton import rms_norm_fwd
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm, rms_norm_reference
from rl_consistency.kernels.rms_norm.schedules import block_width, candidates, pick_backward
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT, assert_within
from rl_consistency.verify.laws import cuts_alike, judged, rows_alike, schedules_alike

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((80, 4096), (80, 1000), (48, 5120), (48, 16, 128), (48, 5, 64))
EPS = 1e-6


def operands(shape, dtype):
    """x, dy, weight."""
    x, dy = (probe(shape, dtype, seed=s).cuda() for s in (0, 3))
    return x, dy * 0.02, probe(shape[-1:], dtype, seed=1).cuda()


def stock(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def gradients(op, x, dy, weight):
    leaves = [x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    y = op(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def heads_of(shape):
    return shape[1] if len(shape) == 3 else 1


def canonical(shape):
    return lambda x, weight: rms_norm(x, weight, EPS, rows_per_token=heads_of(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_fp64(shape, dtype):
    x, dy, weight = operands(shape, dtype)
    ours = gradients(canonical(shape), x, dy, weight)
    wide = [t.double() for t in (x, dy, weight)]
    exact = gradients(lambda x, w: rms_norm_reference(x, w, EPS), *wide)
    for i, (a, b) in enumerate(zip(ours, exact, strict=True)):
        assert_within(a, b, "reduction", dtype, gradient=i > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_as_accurate_as_stock(dtype):
    errors = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(8):
        x, dy, weight = (
            probe(s, dtype, seed=10 * seed + i).cuda()
            for i, s in enumerate([(512, 1000), (512, 1000), (1000,)])
        )
        wide = [t.double() for t in (x, dy * 0.02, weight)]
        exact = gradients(lambda x, w: rms_norm_reference(x, w, EPS), *wide)
        for side, op in enumerate((canonical(x.shape), stock)):
            for i, (a, b) in enumerate(
                zip(gradients(op, x, dy * 0.02, weight), exact, strict=True)
            ):
                errors[side, i] += ((a.double() - b) / b.square().mean(0).sqrt()).abs().mean().cpu()
    assert (errors[0] <= ERROR_GROWTH_LIMIT * errors[1]).all(), errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_the_batch(shape, dtype):
    x, dy, weight = operands(shape, dtype)
    assert judged(rows_alike, "y", lambda rows: rms_norm(rows, weight, EPS), x).passed

    def dx(rows, dy):
        return gradients(canonical(shape), rows, dy, weight)[1]

    assert judged(rows_alike, "dx", dx, x, dy).passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_weight_gradient_does_not_depend_on_the_cut(heads, dtype):
    x, dy, weight = operands((80, heads, 128) if heads > 1 else (80, 4096), dtype)

    parameter = nn.Parameter(weight)
    parameter.grad_dtype = torch.float32
    buffer = GradientBuffer(parameter)

    def backward(x, dy):
        rms_norm(x, parameter, EPS, rows_per_token=heads, weight_grad=buffer).backward(dy)

    assert judged(cuts_alike, (parameter,), backward, (x, dy), (1.0, 0.0)).passed
    parameter.grad = None
    backward(x, dy)
    whole, parameter.grad = parameter.grad, None
    backward(x[:33], dy[:33])
    backward(x[33:], dy[33:])
    assert not same_bytes(parameter.grad, whole)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((80, 4096), torch.bfloat16),
        ((48, 16, 128), torch.bfloat16),
        ((80, 1000), torch.float16),
        ((80, 1000), torch.float32),
    ],
)
def test_every_schedule_gives_the_same_bytes(shape, dtype):
    x, dy, weight = operands(shape, dtype)
    width, heads = shape[-1], heads_of(shape)
    rstd = rms_norm_fwd(x, None, weight, EPS)[2]

    def forward(schedule):
        y, _, root = rms_norm_fwd(x, None, weight, EPS, schedule)
        return torch.cat([y.float().flatten(), root.flatten()])

    def backward(schedule):
        dx, sums = rms_norm_bwd(dy, None, x, weight, rstd, heads, True, schedule)
        return torch.cat([dx.float().view(-1, width), sums])

    assert judged(schedules_alike, "y", [None, *candidates(width)], forward).passed
    assert judged(schedules_alike, "dx", [None, *candidates(width, heads)], backward).passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 100), (35, 3, 64), (1003, 8, 128), (33, 16, 256)])
def test_narrow_rows_give_the_bytes_of_the_other_kernel(shape, dtype):
    tokens, heads, width = shape
    projected, _, weight = operands((tokens, 2 * heads + 1, width), dtype)
    dtotal, dy, _ = operands(shape, dtype)
    x = projected[:, heads : 2 * heads]
    rstd = rms_norm_fwd(x, None, weight, EPS)[2]
    for added, with_sums in ((None, True), (dtotal, False)):
        given = dy, added, x, weight, rstd, heads, with_sums
        expected = rms_norm_bwd(*given, pick_backward(width, heads))
        assert all(map(same_bytes, rms_norm_bwd(*given), expected)), with_sums


@pytest.mark.parametrize("shape", [(80, 4096), (80, 1000), (16, 128)])
def test_the_row_sum_is_the_tree_of_the_order(shape):
    x, _, weight = operands(shape, torch.float32)
    width = block_width(shape[-1])
    groups = F.pad(x * x, (0, width - shape[-1])).unflatten(-1, (width // 8, 8))
    mean = tree_sum(groups.transpose(-1, -2).flatten(-2)).cpu() / shape[-1]
    root = (mean + EPS).double().sqrt().float()
    assert same_bytes(rms_norm_fwd(x, None, weight, EPS)[2].cpu(), 1.0 / root)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_addition_gives_the_bytes_of_the_steps_apart(dtype):
    x, dy, weight = operands((80, 4096), dtype)
    residual, dtotal = (probe((80, 4096), dtype, seed=s).cuda() for s in (5, 6))

    def run(op):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        y, total = op(*leaves)
        torch.autograd.backward([y, total * 1.0], [dy, dtotal])
        return [y, total, *(leaf.grad for leaf in leaves)]

    def apart(x, residual, weight):
        total = residual + x
        return rms_norm(total, weight, EPS), total

    fused = run(lambda x, r, w: add_rms_norm(x, r, w, EPS))
    assert all(map(same_bytes, fused, run(apart)))


def test_unused_outputs_of_the_fused_addition_are_no_gradient():
    x, dy, weight = operands((32, 512), torch.bfloat16)
    for use in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (x, x)]
        add_rms_norm(*leaves, weight, EPS)[use].backward(dy)
        assert same_bytes(leaves[0].grad, leaves[1].grad)
    assert same_bytes(leaves[0].grad, dy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_repetition_do_not_matter(dtype):
    packed, dy, weight = operands((48, 24, 128), dtype)
    x, dy = packed[:, 4:20], dy[:, 4:20]
    expected = gradients(canonical(x.shape), x.contiguous(), dy.contiguous(), weight)
    for view in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
        leaf = view.detach().requires_grad_()
        y = rms_norm(leaf, weight, EPS, rows_per_token=16)
        assert same_bytes(y, expected[0])
        assert same_bytes(torch.autograd.grad(y, leaf, dy)[0], expected[1])
    misaligned = torch.empty(48 * 16 * 128 + 1, dtype=dtype, device="cuda")[1:].view(48, 16, 128)
    found = gradients(canonical(x.shape), misaligned.copy_(x), dy, weight)
    assert all(map(same_bytes, found, expected))


def test_compiled_and_captured_equal_eager():
    x, dy, weight = operands((80, 1024), torch.bfloat16)
    expected = gradients(canonical(x.shape), x, dy, weight)
    compiled = torch.compile(canonical(x.shape), fullgraph=True)
    assert all(map(same_bytes, gradients(compiled, x, dy, weight), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, weight, EPS)
    graph.replay()
    assert same_bytes(y, expected[0])


@pytest.mark.large
def test_offsets_past_two_to_the_31():
    rows, width = 2**31 // 4096 + 17, 4096
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-16:], _, weight = operands((16, width), torch.bfloat16)
    y = rms_norm(x, weight, EPS)
    assert same_bytes(y[-16:], rms_norm(x[-16:].clone(), weight, EPS))


@pytest.mark.large
def test_gradients_of_narrow_rows_past_two_to_the_31():
    heads, width = 16, 128
    tokens = 2**31 // (heads * width) + 16
    x = torch.zeros(tokens, heads, width, dtype=torch.bfloat16, device="cuda")
    x[-16:], _, weight = operands((16, heads, width), torch.bfloat16)
    rstd = torch.ones(tokens * heads, device="cuda")
    dx, sums = rms_norm_bwd(x, None, x, weight, rstd, heads, True)
    last = x[-16:].clone()
    expected = rms_norm_bwd(last, None, last, weight, rstd[: 16 * heads], heads, True)
    assert same_bytes(dx[-16:], expected[0]) and same_bytes(sums[-1:], expected[1])
    # Heads so far apart that a token's offsets take 64 bits.
    apart = x.view(-1).as_strided((3, 8, width), (width, 2**28, 1))
    apart.copy_(last[:3, :8])
    rstd = rstd[:24]
    found = rms_norm_bwd(apart, None, apart, weight, rstd, 8, True)
    dense = apart.contiguous()
    assert all(map(same_bytes, found, rms_norm_bwd(dense, None, dense, weight, rstd, 8, True)))


def test_no_rows_give_no_rows_and_zero_gradient():
    weight = torch.ones(512, device="cuda", requires_grad=True)
    rms_norm(torch.zeros(0, 512, device="cuda"), weight, EPS).sum().backward()
    assert same_bytes(weight.grad, torch.zeros(512, device="cuda"))


def test_bad_operands_are_refused():
    x, _, weight = operands((16, 512), torch.bfloat16)
    with pytest.raises(ValueError, match="weight is on cpu but x is on cuda"):
        rms_norm(x, weight.cpu(), EPS)
    with pytest.raises(ValueError, match="rows of 20000 elements on a GPU"):
        rms_norm(torch.ones(1, 20000, device="cuda"), torch.ones(20000, device="cuda"), EPS)


def test_another_order_for_few_rows_fails_the_same_check():
    x, _, weight = operands((80, 1000), torch.float32)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).cuda()

    def mutant(rows):
        if len(rows) >= 80:
            return rms_norm(rows, weight, EPS)
        return rms_norm(rows[:, order], weight[order], EPS)[:, order.argsort()]

    assert judged(rows_alike, "y", mutant, x).mismatches > 0
