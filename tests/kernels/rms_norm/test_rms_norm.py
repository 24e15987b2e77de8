import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.kernels.gradient_fold.op import GradientBuffer
from rl_consistency.kernels.rms_norm.op import rms_norm, rms_norm_reference
from rl_consistency.parity.digest import first_difference
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.probe import probe

ROWS, H, EPS = 80, 320, 1e-6
CUTS = ([16], [32, 48], [64], list(range(16, ROWS, 16)))


def same_bytes(a, b):
    return first_difference({"": a}, {"": b}) is None


def operands(dtype=torch.float32):
    return probe((ROWS, H), dtype), probe((H,), dtype, seed=1)


def differing_calls(op, x):
    """Calls on some of the rows of x [80, ...] whose result differs from the whole's."""
    whole = op(x)
    indices = [[i] for i in (0, 1, 15, 16, 17, 63, 79)]
    indices += [range(2), range(7), range(17), range(33), range(5, 40)]
    indices += [torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)), [3] * 20]
    return sum(not same_bytes(op(x[list(i)]), whole[list(i)]) for i in indices)


def weight_gradient(cuts, dtype, heads=1, buffered=True, filler=0):
    shape = (ROWS, H) if heads == 1 else (ROWS, heads, H)
    x, dy = probe(shape, dtype), probe(shape, dtype, seed=3)
    weight = nn.Parameter(probe((H,), dtype, seed=1))
    buffer = GradientBuffer(weight) if buffered else None
    edges = [0, *cuts, ROWS]
    for start, stop in itertools.pairwise(edges):
        rows = torch.cat([x[start:stop], x[:filler]])
        y = rms_norm(rows, weight, EPS, rows_per_token=heads, weight_grad=buffer)
        y.backward(torch.cat([dy[start:stop], torch.zeros_like(dy[:filler])]))
    return weight.grad


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
    assert differing_calls(lambda rows: rms_norm(rows, weight, EPS), x) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_gradients_do_not_depend_on_the_batch(dtype):
    x, weight = operands(dtype)

    def dx(pair):
        rows, dy = pair.unbind(1)
        rows = rows.clone().requires_grad_()
        rms_norm(rows, weight, EPS).backward(dy)
        return rows.grad

    assert differing_calls(dx, torch.stack([x, probe((ROWS, H), dtype, seed=3)], dim=1)) == 0


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
    whole = weight_gradient([], dtype, heads)
    for cuts in CUTS:
        assert same_bytes(weight_gradient(cuts, dtype, heads), whole), cuts
    assert same_bytes(weight_gradient([32], dtype, heads, filler=16), whole)


def test_heads_counted_as_tokens_fail_the_same_check():
    """Steps of 16 rows instead of 16 tokens: a cut after 16 tokens of 3 heads falls elsewhere."""
    x, dy = probe((48, 5, H)), probe((48, 5, H), seed=3)
    gradients = []
    for cuts in ([0, 48], [0, 24, 48]):
        weight = nn.Parameter(probe((H,), seed=1))
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
    whole, cut = (weight_gradient(cuts, torch.float32, buffered=False) for cuts in ([], [32, 48]))
    assert not same_bytes(whole, cut)
    x, weight = operands()
    dy = probe((ROWS, H), seed=3)
    sums = []
    for cuts in ([0, 80], [0, 32, 48, 80]):
        param = nn.Parameter(weight)
        for a, b in itertools.pairwise(cuts):
            F.rms_norm(x[a:b], (H,), param, EPS).backward(dy[a:b])
        sums.append(param.grad)
    assert not same_bytes(*sums)


def test_a_row_dependent_order_fails_the_same_check():
    x, weight = operands()
    shuffled = torch.randperm(H, generator=torch.Generator().manual_seed(0))

    def mutant(rows):
        if rows.shape[0] >= 16:
            return rms_norm(rows, weight, EPS)
        return rms_norm(rows[:, shuffled], weight[shuffled], EPS)[:, shuffled.argsort()]

    assert differing_calls(mutant, x) > 0
