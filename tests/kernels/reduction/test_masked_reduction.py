import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.masked_reduction import masked_mean, masked_sum
from rl_consistency.parity.bytes import same_bytes

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


def test_mask_may_be_numeric_and_values_strided():
    batch, mask = padded(rows(), "right", 3)
    expected = masked_mean(batch, mask)
    assert same_bytes(masked_mean(batch, mask.float()), expected)
    strided = batch.t().contiguous().t()
    assert same_bytes(masked_mean(strided, mask), expected)
    assert same_bytes(masked_mean(batch, mask), expected)


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
