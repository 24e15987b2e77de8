import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.linear.op import linear, linear_glu, linear_qkv
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.parity.bytes import same_bytes

ROWS, K, N = 80, 160, 48


def operands(dtype=torch.float32):
    x = probe((ROWS, K), dtype, scale=0.25)
    return x, probe((N, K), dtype, seed=1, scale=K**-0.5), probe((N,), dtype, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dimensions_and_padding_do_not_matter(dtype):
    x, weight, bias = operands(dtype)
    expected = linear(x, weight, bias)
    assert same_bytes(linear(x.view(4, 20, K), weight, bias).view(ROWS, N), expected)
    junk = torch.full((9, K), float("nan"), dtype=dtype)
    padded = linear(torch.cat([junk, x, junk]), weight, bias)
    assert same_bytes(padded[9:-9], expected)


def test_bad_operands_are_refused():
    x, weight, bias = operands()
    with pytest.raises(ValueError, match=r"linear: x \(80, 159\) does not fit weight \(48, 160\)"):
        linear(x[:, 1:], weight, bias)
    with pytest.raises(ValueError, match="weight is"):
        linear(x, weight[0], bias)
    with pytest.raises(ValueError, match=r"linear: bias \(47,\) does not fit weight \(48, 160\)"):
        linear(x, weight, bias[1:])
    with pytest.raises(TypeError, match="bias is torch.bfloat16"):
        linear(x, weight, bias.bfloat16())
    with pytest.raises(TypeError, match="float8"):
        linear(x.to(torch.float8_e4m3fn), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_forms_give_the_bytes_of_the_ops_they_stand_for(dtype):
    x, weight, bias = operands(dtype)
    weights = (weight, weight[:16], weight.flip(0))
    for biases in ((None, None, None), (bias, bias[:16], bias), (bias, None, None)):
        for y, w, b in zip(linear_qkv(x, weights, biases), weights, biases, strict=True):
            assert same_bytes(y, linear(x, w, b))
    y = linear_glu(x.view(4, 20, K), weight, weight.flip(0), "gelu")
    expected = glu(linear(x, weight), linear(x, weight.flip(0)), "gelu")
    assert same_bytes(y.view(ROWS, N), expected)
    assert linear_qkv(x[:0].view(3, 0, K), weights)[1].shape == (3, 0, 16)
    assert linear_glu(x[:0], weight, weight).shape == (0, N)


def test_fused_forms_refuse_bad_operands_and_gradients():
    x, weight, bias = operands()
    with pytest.raises(ValueError, match=r"linear_qkv: bias \(47,\) does not fit"):
        linear_qkv(x, (weight,) * 3, (bias[1:], None, None))
    with pytest.raises(ValueError, match=r"linear_glu: w_gate \(48, 160\) and w_up \(47, 160\)"):
        linear_glu(x, weight, weight[1:])
    with pytest.raises(ValueError, match="activation 'relu'; allowed: silu, gelu, gelu_tanh"):
        linear_glu(x, weight, weight, "relu")
    weight.requires_grad_()
    for call in (lambda: linear_qkv(x, (weight,) * 3), lambda: linear_glu(x, weight, weight)):
        with pytest.raises(ValueError, match=r"computes no gradients.*no_grad.*or use linear"):
            call()
        with torch.no_grad():
            call()
