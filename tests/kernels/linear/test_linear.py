from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.glu.op import glu
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.op import linear, linear_glu, linear_qkv, linear_reference
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import cuts_alike, judged, rows_alike

ROWS, K, N = 80, 160, 48


def operands(dtype=torch.float32):
    x = probe((ROWS, K), dtype, scale=0.25)
    return x, probe((N, K), dtype, seed=1, scale=K**-0.5), probe((N,), dtype, seed=2)


def judged_cuts(op, dtype, buffered):
    """The law of cuts for weight and bias."""
    _, weight, bias = (nn.Parameter(t) for t in operands(dtype))
    weight.grad_dtype = bias.grad_dtype = torch.float32
    buffers = {"weight_grad": GradientBuffer(weight), "bias_grad": GradientBuffer(bias)}
    options = buffers if buffered else {}

    def backward(x, dy):
        op(x, weight, bias, **options).backward(dy)

    inputs = operands(dtype)[0], probe((ROWS, N), dtype, seed=3)
    return judged(cuts_alike, (weight, bias), backward, inputs, (1.0, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_fp64(dtype):
    x, weight, bias = operands(dtype)
    for b in (bias, None):
        assert_within(linear(x, weight, b), linear_reference(x, weight, b), "reduction", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_match_fp64(dtype):
    leaves = [t.requires_grad_() for t in operands(dtype)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dy = probe((ROWS, N), dtype, seed=3)
    linear(*leaves).backward(dy)
    linear_reference(*exact).backward(dy.double())
    for ours, reference in zip(leaves, exact, strict=True):
        assert ours.grad.dtype == dtype
        assert_within(ours.grad, reference.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_do_not_depend_on_the_batch(dtype, with_bias):
    x, weight, bias = operands(dtype)
    op = partial(linear, weight=weight, bias=bias if with_bias else None)
    assert judged(rows_alike, "y", op, x).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_gradients_do_not_depend_on_the_batch(dtype):
    _, weight, _ = operands(dtype)

    def dx(dy):
        x = torch.zeros(dy.shape[0], K, dtype=dtype, requires_grad=True)
        linear(x, weight).backward(dy)
        return x.grad

    assert judged(rows_alike, "dx", dx, probe((ROWS, N), dtype, seed=3)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dimensions_and_padding_do_not_matter(dtype):
    x, weight, bias = operands(dtype)
    expected = linear(x, weight, bias)
    assert same_bytes(linear(x.view(4, 20, K), weight, bias).view(ROWS, N), expected)
    junk = torch.full((9, K), float("nan"), dtype=dtype)
    padded = linear(torch.cat([junk, x, junk]), weight, bias)
    assert same_bytes(padded[9:-9], expected)
    assert same_bytes(linear(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_does_not_depend_on_the_cut(dtype):
    assert judged_cuts(linear, dtype, buffered=True).passed


def test_non_contiguous_operands_give_the_same_bytes():
    x, weight, bias = operands()
    expected = linear(x, weight, bias)
    strided = [t.t().contiguous().t() for t in (x, weight)]
    assert same_bytes(linear(*strided, bias), expected)
    dy = probe((N, ROWS), seed=3).t()
    results = []
    for layout in (dy, dy.contiguous()):
        w = weight.clone().requires_grad_()
        linear(x, w, bias).backward(layout)
        results.append(w.grad)
    assert same_bytes(*results)


def test_no_rows_give_no_rows_and_zero_gradients():
    _, weight, bias = (t.requires_grad_() for t in operands())
    y = linear(torch.zeros(0, K), weight, bias)
    assert y.shape == (0, N)
    y.sum().backward()
    assert same_bytes(weight.grad, torch.zeros(N, K))
    assert same_bytes(bias.grad, torch.zeros(N))


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


def test_torch_linear_fails_the_same_checks():
    x, weight, bias = operands()
    assert judged(rows_alike, "y", lambda r: F.linear(r, weight, bias), x).mismatches > 0
    assert judged_cuts(F.linear, torch.float32, buffered=False).mismatches > 0


def test_a_row_dependent_order_fails_the_same_check():
    x, weight, bias = operands()
    flip = torch.arange(K).flip(0)

    def mutant(rows):
        if rows.shape[0] >= 16:
            return linear(rows, weight, bias)
        return linear(rows[:, flip], weight[:, flip], bias)

    assert judged(rows_alike, "y", mutant, x).mismatches > 0
