import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.parity.bytes import same_bytes

SIZES = (1, 2, 3, 7, 16, 31, 64, 100, 257, 1000)


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


def test_gradient_is_the_rows_gradient():
    x = probe((6, 100)).requires_grad_()
    dy = probe((6,), seed=1)
    tree_sum(x).backward(dy)
    assert same_bytes(x.grad, dy[:, None].expand(6, 100))


def test_sum_of_nothing_is_zero():
    assert same_bytes(tree_sum(torch.empty(3, 0)), torch.zeros(3))
    assert tree_sum(torch.empty(0, 5)).shape == (0,)
