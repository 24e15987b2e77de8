import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_fwd, rotary_table
from rl_consistency.parity.bytes import same_bytes

TOKENS, HEADS, KV_HEADS, D = 70, 4, 2, 32
INV_FREQ = 1e4 ** (-torch.arange(0, D, 2).float() / D)


def operands(dtype=torch.float32):
    return probe((TOKENS, HEADS, D), dtype), probe((TOKENS, KV_HEADS, D), dtype, seed=1)


def test_table_rows_do_not_depend_on_its_length():
    long = rotary_table(INV_FREQ, 5000, 1.3)
    for rows in (1, 2, 17, 1024):
        assert same_bytes(rotary_table(INV_FREQ, rows, 1.3), long[:, :rows])
    assert rotary_table(INV_FREQ, 0).shape == (2, 0, D // 2)


def test_table_is_the_rounded_fp64_cosine():
    positions = torch.arange(100000, dtype=torch.float64)
    exact = (positions[:, None] * INV_FREQ.double()).cos()
    assert same_bytes(rotary_table(INV_FREQ, 100000)[0], exact.float())


def test_bad_operands_are_refused():
    q, k = operands()
    cos, sin = rotary_table(INV_FREQ, TOKENS)
    with pytest.raises(ValueError, match=r"cos \(69, 16\).*must be \(70, 16\)"):
        rotary(q, k, cos[1:], sin)
    with pytest.raises(TypeError, match=r"cos is torch.bfloat16.*must be float32"):
        rotary(q, k, cos.bfloat16(), sin)
    with pytest.raises(TypeError, match="k is torch.bfloat16 but q is torch.float32"):
        rotary(q, k.bfloat16(), cos, sin)


# The kernel, in Triton's interpreter.


def of_kernels(dtype=torch.float32, head_dim=24):
    q, k = (probe((21, h, head_dim), dtype, seed=h) for h in (3, 2))
    inv_freq = 1e4 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    return q, k, *rotary_table(inv_freq, 100)[:, torch.arange(21) * 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_both_directions_give_the_bytes_of_the_cpu(head_dim, dtype):
    q, k, cos, sin = of_kernels(dtype, head_dim)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    expected = rotary(*leaves, cos, sin)
    assert all(map(same_bytes, rotary_fwd(q, k, cos, sin, False), expected))
    torch.autograd.backward(expected, [q, k])
    found = rotary_fwd(q, k, cos, sin, True)
    assert all(map(same_bytes, found, [leaf.grad for leaf in leaves]))


def test_strides_do_not_matter():
    q, k, cos, sin = of_kernels()
    expected = rotary_fwd(q, k, cos, sin, False)
    together = torch.cat([q, k], dim=1)
    views = together[:, :3], together[:, 3:]
    assert all(map(same_bytes, rotary_fwd(*views, cos, sin, False), expected))
    views = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k))
    assert all(map(same_bytes, rotary_fwd(*views, cos, sin, False), expected))


def test_a_fused_multiply_add_fails_the_same_check():
    q, k, cos, sin = of_kernels()
    first, second = q.double().chunk(2, dim=-1)
    cos64, sin64 = cos.double()[:, None], sin.double()[:, None]
    fused = (first * cos64 - (second * sin64).float().double()).float()
    assert not same_bytes(fused, rotary_fwd(q, k, cos, sin, False)[0].chunk(2, dim=-1)[0])
