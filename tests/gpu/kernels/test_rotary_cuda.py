import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.rotary import (
    rotary,
    rotary_table,
)
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((70, 16, 8, 128), (70, 4, 2, 80), (70, 5, 1, 64))


def inverse_frequencies(head_dim):
    return 1e4 ** (-torch.arange(0, head_dim, 2).float() / head_dim)


def operands(shape, dtype, device="cuda"):
    """q, k, cos, sin, positions."""
    tokens, heads, kv_heads, head_dim = shape
    q, k = (probe((tokens, h, head_dim), dtype, seed=h).to(device) for h in (heads, kv_heads))
    positions = torch.arange(tokens, device=device) * 37 % 2000
    table = rotary_table(inverse_frequencies(head_dim).to(device), 2048)
    return q, k, table[0, positions], table[1, positions], positions


def both_ways(q, k, cos, sin):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    rotated = rotary(*leaves, cos, sin)
    torch.autograd.backward(rotated, [q * 0.5, k * 0.5])
    return [*(x.detach() for x in rotated), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_directions_give_the_bytes_of_the_cpu(shape, dtype):
    ours, cpu = (both_ways(*operands(shape, dtype, device)[:4]) for device in ("cuda", "cpu"))
    assert all(same_bytes(a.cpu(), b) for a, b in zip(ours, cpu, strict=True))


def test_the_table_is_that_of_the_cpu():
    inv_freq = inverse_frequencies(128)
    assert same_bytes(rotary_table(inv_freq.cuda(), 5000).cpu(), rotary_table(inv_freq, 5000))


@pytest.mark.large
def test_offsets_past_two_to_the_31():
    q, k, cos, sin, _ = operands((16, 16, 1, 128), torch.bfloat16)
    tokens = 2**31 // (16 * 128) + 16
    many = torch.zeros(tokens, 16, 128, dtype=torch.bfloat16, device="cuda")
    angles = torch.zeros(2, tokens, 64, device="cuda")
    many[-16:], angles[0, -16:], angles[1, -16:] = q, cos, sin
    few = torch.zeros(tokens, 1, 128, dtype=torch.bfloat16, device="cuda")
    assert same_bytes(rotary(many, few, *angles)[0][-16:], rotary(q, k, cos, sin)[0])
