import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.masked_reduction import masked_mean, masked_sum
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within

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


def layouts(values):
    yield torch.cat(values), None
    for side in ("left", "right"):
        for extra in (0, 3, 16):
            yield padded(values, side, extra)


def differing_layouts(op, values):
    results = [op(batch, mask) for batch, mask in layouts(values)]
    return sum(not same_bytes(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_fp64(dtype):
    batch, mask = padded(rows(dtype), "left", 3)
    exact = torch.cat(rows(dtype)).double()
    assert_within(masked_sum(batch, mask), exact.sum(), "reduction", torch.float32)
    assert_within(masked_mean(batch, mask), exact.mean(), "reduction", torch.float32)
    assert masked_mean(batch, mask).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [masked_sum, masked_mean])
def test_padding_and_packing_do_not_matter(op, dtype):
    assert differing_layouts(op, rows(dtype)) == 0


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


def test_products_with_the_mask_fail_the_same_check():
    """What trainers write: (values * mask).sum() / mask.sum()."""

    def stock(values, mask):
        mask = torch.ones_like(values) if mask is None else mask.float()
        return (values.nan_to_num() * mask).sum() / mask.sum()

    assert differing_layouts(stock, rows()) > 0
