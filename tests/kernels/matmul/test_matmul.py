import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt, row_matmul, tile_matmul
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.laws import judged, rows_alike
from tests.comparison import first_difference

ROWS = 70


def operands(k, n, dtype=torch.float32):
    return probe((ROWS, k), dtype, seed=k), probe((k, n), dtype, seed=n, scale=k**-0.5)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes_rounds_one_accumulator_once(dtype, out_dtype):
    a, b = operands(100, 48, dtype)
    bias = probe((48,), dtype, seed=2)
    wide = row_matmul(a, b)
    found = {
        "nn": matmul_nn(a, b, out_dtype=out_dtype),
        "nt": matmul_nt(a, b.t().contiguous(), out_dtype=out_dtype),
        "bias": matmul_nt(a, b.t(), bias=bias, out_dtype=out_dtype),
        "row": matmul_nt(a[7:8], b.t(), bias=bias, out_dtype=out_dtype),
    }
    biased = (wide + bias.float()).to(out_dtype)
    expected = {"nn": wide.to(out_dtype), "nt": wide.to(out_dtype)}
    expected |= {"bias": biased, "row": biased[7:8]}
    assert first_difference(found, expected) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_the_batch_at_any_thread_count(threads):
    before = torch.get_num_threads()
    a, b = operands(512, 768)
    torch.set_num_threads(threads)
    try:
        assert judged(rows_alike, "y", lambda rows: row_matmul(rows, b), a).passed
    finally:
        torch.set_num_threads(before)


def test_neighbours_of_any_value_do_not_matter():
    a, b = operands(100, 33)
    junk = torch.tensor([float("nan"), float("inf"), -1e30])[:, None].expand(3, 100)
    padded = row_matmul(torch.cat([junk, a, junk]), b)
    assert same_bytes(padded[3:-3], row_matmul(a, b))


@pytest.mark.parametrize("m, k, n", [(0, 5, 4), (3, 5, 0), (0, 5, 0)])
def test_a_product_without_elements_is_empty(m, k, n):
    assert row_matmul(torch.zeros(m, k), torch.zeros(k, n)).shape == (m, n)


def test_a_product_over_nothing_is_zero():
    assert same_bytes(row_matmul(torch.zeros(3, 0), torch.zeros(0, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_do_not_depend_on_the_other_products(tile):
    a, b = probe((9, tile, 64)), probe((9, 64, 48), seed=1)
    whole = tile_matmul(a, b)
    for index in ([0], [8], [1, 2], [4, 3, 2], list(range(7))):
        assert same_bytes(tile_matmul(a[index], b[index]), whole[index])
