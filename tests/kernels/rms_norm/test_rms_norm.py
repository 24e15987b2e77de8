import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.rms_norm.op import rms_norm, rms_norm_reference
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import cuts_alike, judged, leaf_gradients, rows_alike

ROWS, H, EPS = 80, 320, 1e-6


def operands(dtype=torch.float32):
    return probe((ROWS, H), dtype), probe((H,), dtype, seed=1)


def judged_cuts(op, dtype, heads=1):
    """The law of cuts for the weight; `op` maps (x, weight, buffer) to y."""
    shape = (ROWS, H) if heads == 1 else (ROWS, heads, H)
    weight = nn.Parameter(probe((H,), dtype, seed=1))
    weight.grad_dtype = torch.float32
    buffer = GradientBuffer(weight)

    def backward(x, dy):
        op(x, weight, buffer).backward(dy)

    inputs = probe(shape, dtype), probe(shape, dtype, seed=3)
    return judged(cuts_alike, (weight,), backward, inputs, (1.0, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, H), (5, 4, 64), (3, 7)])
def test_matches_fp64(shape, dtype):
    x, weight = probe(shape, dtype), probe(shape[-1:], dtype, seed=1)
    assert_within(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS), "reduction", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_match_fp64(dtype):
    leaves = [t.requires_grad_() for t in operands(dtype)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dy = probe((ROWS, H), dtype, seed=3)
    rms_norm(*leaves, EPS).backward(dy)
    rms_norm_reference(*exact, EPS).backward(dy.double())
    for ours, reference in zip(leaves, exact, strict=True):
        assert ours.grad.dtype == dtype
        assert_within(ours.grad, reference.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_the_batch(dtype):
    x, weight = operands(dtype)
    assert judged(rows_alike, "y", lambda rows: rms_norm(rows, weight, EPS), x).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_gradients_do_not_depend_on_the_batch(dtype):
    x, weight = operands(dtype)

    def dx(rows, dy):
        return leaf_gradients(lambda rows: rms_norm(rows, weight, EPS), (rows,), dy)[0]

    assert judged(rows_alike, "dx", dx, x, probe((ROWS, H), dtype, seed=3)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dimensions_strides_and_padding_do_not_matter(dtype):
    x, weight = operands(dtype)
    expected = rms_norm(x, weight, EPS)
    assert same_bytes(rms_norm(x.view(4, 20, H), weight, EPS).view(ROWS, H), expected)
    assert same_bytes(rms_norm(x.t().contiguous().t(), weight, EPS), expected)
    junk = torch.full((9, H), float("nan"), dtype=dtype)
    assert same_bytes(rms_norm(torch.cat([junk, x]), weight, EPS)[9:], expected)
    assert same_bytes(rms_norm(x, weight, EPS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
def test_gradient_does_not_depend_on_the_cut(heads, dtype):
    def op(x, weight, buffer):
        return rms_norm(x, weight, EPS, rows_per_token=heads, weight_grad=buffer)

    assert judged_cuts(op, dtype, heads).passed


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


def test_no_rows_give_no_rows_and_zero_gradient():
    weight = operands()[1].requires_grad_()
    y = rms_norm(torch.zeros(0, H), weight, EPS)
    assert y.shape == (0, H)
    y.sum().backward()
    assert same_bytes(weight.grad, torch.zeros(H))


def test_bad_operands_are_refused():
    x, weight = operands()
    with pytest.raises(ValueError, match=r"rms_norm: weight \(319,\) does not fit x \(80, 320\)"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(TypeError, match="weight is torch.bfloat16 but x is torch.float32"):
        rms_norm(x, weight.bfloat16(), EPS)


def test_stock_gradient_fails_the_same_check():
    for op in (
        lambda x, weight, _: rms_norm(x, weight, EPS),
        lambda x, weight, _: F.rms_norm(x, (H,), weight, EPS),
    ):
        assert judged_cuts(op, torch.float32).mismatches > 0


def test_a_row_dependent_order_fails_the_same_check():
    x, weight = operands()
    shuffled = torch.randperm(H, generator=torch.Generator().manual_seed(0))

    def mutant(rows):
        if rows.shape[0] >= 16:
            return rms_norm(rows, weight, EPS)
        return rms_norm(rows[:, shuffled], weight[shuffled], EPS)[:, shuffled.argsort()]

    assert judged(rows_alike, "y", mutant, x).mismatches > 0
