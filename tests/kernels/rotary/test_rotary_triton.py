import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.rotary import (
    rotary,
    rotary_fwd,
    rotary_op,
    rotary_table,
)
from rl_consistency.parity.bytes import same_bytes

TOKENS, HEADS, KV_HEADS = 21, 3, 2
DTYPES = [torch.float32, torch.bfloat16]


def operands(dtype=torch.float32, head_dim=24):
    q, k = (probe((TOKENS, h, head_dim), dtype, seed=h) for h in (HEADS, KV_HEADS))
    inv_freq = 1e4 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    return q, k, *rotary_table(inv_freq, 100)[:, torch.arange(TOKENS) * 3]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_both_directions_give_the_bytes_of_the_cpu(head_dim, dtype):
    q, k, cos, sin = operands(dtype, head_dim)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    expected = rotary(*leaves, cos, sin)
    assert all(map(same_bytes, rotary_fwd(q, k, cos, sin, False), expected))
    torch.autograd.backward(expected, [q, k])
    found = rotary_fwd(q, k, cos, sin, True)
    assert all(map(same_bytes, found, [leaf.grad for leaf in leaves]))


def test_strides_do_not_matter():
    q, k, cos, sin = operands()
    expected = rotary_fwd(q, k, cos, sin, False)
    together = torch.cat([q, k], dim=1)
    views = together[:, :HEADS], together[:, HEADS:]
    assert all(map(same_bytes, rotary_fwd(*views, cos, sin, False), expected))
    views = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k))
    assert all(map(same_bytes, rotary_fwd(*views, cos, sin, False), expected))


def test_a_fused_multiply_add_fails_the_same_check():
    q, k, cos, sin = operands()
    first, second = q.double().chunk(2, dim=-1)
    cos64, sin64 = cos.double()[:, None], sin.double()[:, None]
    fused = (first * cos64 - (second * sin64).float().double()).float()
    assert not same_bytes(fused, rotary_fwd(q, k, cos, sin, False)[0].chunk(2, dim=-1)[0])


def test_the_op_of_a_compiler_gives_the_bytes_of_the_launcher():
    q, k, cos, sin = operands()
    found = rotary_op(q, k, cos, sin, False)
    assert all(map(same_bytes, found, rotary_fwd(q, k, cos, sin, False)))
    torch.library.opcheck(
        torch.ops.rl_consistency.rotary_op.default,
        (q, k, cos, sin, True),
        test_utils="test_faketensor",
    )
