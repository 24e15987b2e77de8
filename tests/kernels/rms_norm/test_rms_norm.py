import itertools

import pytest
import torch
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.parity.bytes import same_bytes

ROWS, H, EPS = 80, 320, 1e-6


def operands(dtype=torch.float32):
    return probe((ROWS, H), dtype), probe((H,), dtype, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dimensions_and_padding_do_not_matter(dtype):
    x, weight = operands(dtype)
    expected = rms_norm(x, weight, EPS)
    assert same_bytes(rms_norm(x.view(4, 20, H), weight, EPS).view(ROWS, H), expected)
    junk = torch.full((9, H), float("nan"), dtype=dtype)
    assert same_bytes(rms_norm(torch.cat([junk, x]), weight, EPS)[9:], expected)


def test_heads_counted_as_tokens_fail_the_same_check():
    """Steps of 16 rows instead of 16 tokens: a cut after 16 tokens of 3 heads falls elsewhere."""
    x, dy = probe((48, 5, H)), probe((48, 5, H), seed=3)
    gradients = []
    for cuts in ([0, 48], [0, 24, 48]):
        weight = nn.Parameter(probe((H,), seed=1))
        weight.grad_dtype = torch.float32
        buffer = GradientBuffer(weight)
        for a, b in itertools.pairwise(cuts):
            rms_norm(x[a:b], weight, EPS, weight_grad=buffer).backward(dy[a:b])
        gradients.append(weight.grad)
    assert not same_bytes(*gradients)


def test_bad_operands_are_refused():
    x, weight = operands()
    with pytest.raises(ValueError, match=r"rms_norm: weight \(319,\) does not fit x \(80, 320\)"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(TypeError, match="weight is torch.bfloat16 but x is torch.float32"):
        rms_norm(x, weight.bfloat16(), EPS)
