import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.rotary import rotary, rotary_table
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
