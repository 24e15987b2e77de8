import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd, rms_norm_fwd
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm
from rl_consistency.kernels.rms_norm.schedules import pick_backward
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.rms_norm.test_rms_norm_triton import grouped_tree

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6


def operands(shape, dtype):
    """x, dy, weight."""
    x, dy = (probe(shape, dtype, seed=s).cuda() for s in (0, 3))
    return x, dy * 0.02, probe(shape[-1:], dtype, seed=1).cuda()


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
    mean = grouped_tree(x * x).cpu() / shape[-1]
    root = (mean + EPS).double().sqrt().float()
    assert same_bytes(rms_norm_fwd(x, None, weight, EPS)[2].cpu(), 1.0 / root)


def test_unused_outputs_of_the_fused_addition_are_no_gradient():
    x, dy, weight = operands((32, 512), torch.bfloat16)
    for use in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (x, x)]
        add_rms_norm(*leaves, weight, EPS)[use].backward(dy)
        assert same_bytes(leaves[0].grad, leaves[1].grad)
    assert same_bytes(leaves[0].grad, dy)


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
