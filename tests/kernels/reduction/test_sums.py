import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.sums import gradient_norm, masked_mean, masked_sum, tree_sum
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


def test_rows_of_nothing_add_up_to_zero():
    assert same_bytes(tree_sum(torch.empty(3, 0)), torch.zeros(3))
    assert tree_sum(torch.empty(0, 5)).shape == (0,)


LENGTHS = (5, 17, 40, 1, 33)


def rows(dtype=torch.float32):
    return [probe((n,), dtype, seed=n) for n in LENGTHS]


def padded(values, side, extra):
    """[B, L] values and mask, padding of NaN on one side."""
    width = max(LENGTHS) + extra
    batch = torch.full((len(values), width), torch.nan, dtype=values[0].dtype)
    mask = torch.zeros(len(values), width, dtype=torch.bool)
    for i, value in enumerate(values):
        start = width - len(value) if side == "left" else 0
        batch[i, start : start + len(value)] = value
        mask[i, start : start + len(value)] = True
    return batch, mask


@pytest.mark.parametrize("op", [masked_sum, masked_mean])
def test_gradient_is_shared_by_the_active_values(op):
    batch, mask = padded(rows(), "left", 3)
    batch.requires_grad_()
    op(batch, mask).backward(torch.tensor(3.0))
    share = 3.0 if op is masked_sum else (torch.tensor(3.0) / sum(LENGTHS)).item()
    assert same_bytes(batch.grad, torch.where(mask, share, 0.0))


def test_mask_may_be_numeric():
    batch, mask = padded(rows(), "right", 3)
    assert same_bytes(masked_mean(batch, mask.float()), masked_mean(batch, mask))


def test_sum_of_nothing_is_zero_and_its_mean_is_refused():
    values = torch.ones(2, 3)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert same_bytes(masked_sum(values, nothing), torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"no value is active.*loss mask"):
        masked_mean(values, nothing)
    with pytest.raises(ValueError, match="no value is active"):
        masked_mean(torch.zeros(0))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"mask \(3,\) must have the shape of the values \(2, 3\)"):
        masked_sum(torch.ones(2, 3), torch.ones(3, dtype=torch.bool))


SHAPES = ((40, 33), (17,), (1, 1), (64, 64))


def gradients(dtype=torch.float32):
    return [probe(shape, dtype, seed=i) for i, shape in enumerate(SHAPES)]


def test_tensors_are_added_in_the_order_given():
    total = torch.zeros(())
    for gradient in gradients():
        total = total + tree_sum((gradient * gradient).flatten())
    assert same_bytes(gradient_norm(gradients()), total.sqrt())
    assert same_bytes(gradient_norm(iter(gradients())), total.sqrt())


def test_norm_of_nothing_is_zero():
    assert same_bytes(gradient_norm([]), torch.zeros(()))
    assert same_bytes(gradient_norm([torch.zeros(0)]), torch.zeros(()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad):
    assert not torch.isfinite(gradient_norm([*gradients(), torch.tensor([1.0, bad])]))


def test_no_graph_is_kept():
    assert not gradient_norm([probe((3, 3)).requires_grad_()]).requires_grad


def test_another_order_of_the_tensors_fails_the_same_check():
    differing = [
        not same_bytes(
            gradient_norm([probe((50,), seed=10 * s + i) for i in range(6)]),
            gradient_norm([probe((50,), seed=10 * s + i) for i in reversed(range(6))]),
        )
        for s in range(10)
    ]
    assert any(differing)
