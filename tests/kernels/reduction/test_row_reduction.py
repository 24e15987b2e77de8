import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import judged, rows_alike

SIZES = (1, 2, 3, 7, 16, 31, 64, 100, 257, 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", SIZES)
def test_matches_fp64(n, dtype):
    x = probe((40, n), dtype, seed=n)
    assert tree_sum(x).dtype == torch.float32
    assert_within(tree_sum(x), x.double().sum(-1), "reduction", torch.float32)


@pytest.mark.parametrize("n", SIZES)
def test_adds_by_halves(n):
    """The order's text, followed literally in Python floats rounded to fp32."""
    values = list(probe((n,), seed=n).unbind())
    width = 1
    while width < n:
        width *= 2
    while width > 1:
        width //= 2
        for i in range(min(width, len(values))):
            if i + width < len(values):
                values[i] = values[i] + values[i + width]
        values = values[:width]
    assert same_bytes(tree_sum(probe((n,), seed=n)), values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
def test_rows_do_not_depend_on_the_batch(n, dtype):
    assert judged(rows_alike, "sum", tree_sum, probe((70, n), dtype, seed=n)).passed


def test_strides_and_leading_dimensions_do_not_matter():
    x = probe((6, 5, 100))
    expected = tree_sum(x)
    assert same_bytes(tree_sum(x.reshape(30, 100)).view(6, 5), expected)
    assert same_bytes(tree_sum(x.transpose(0, 2).contiguous().transpose(0, 2)), expected)
    assert same_bytes(tree_sum(x.transpose(1, 2), dim=1), expected)
    assert same_bytes(tree_sum(x), expected)


def test_gradient_is_the_rows_gradient():
    x = probe((6, 100)).requires_grad_()
    dy = probe((6,), seed=1)
    tree_sum(x).backward(dy)
    assert same_bytes(x.grad, dy[:, None].expand(6, 100))


def test_sum_of_nothing_is_zero():
    assert same_bytes(tree_sum(torch.empty(3, 0)), torch.zeros(3))
    assert tree_sum(torch.empty(0, 5)).shape == (0,)


def test_torch_sum_fails_the_same_check():
    """torch chooses its order by the shape of the whole tensor when the summed one is strided."""

    def stock(x):
        return x.t().contiguous().sum(0)

    assert judged(rows_alike, "sum", stock, probe((70, 1000))).mismatches > 0
