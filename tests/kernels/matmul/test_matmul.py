import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt, row_matmul, tile_matmul
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.laws import judged, rows_alike

ROWS = 70


def operands(k, n, dtype=torch.float32):
    return probe((ROWS, k), dtype, seed=k), probe((k, n), dtype, seed=n, scale=k**-0.5)


@pytest.fixture
def device():
    return "cpu"


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes_rounds_one_accumulator_once(dtype, out_dtype, device):
    a, b = (x.to(device) for x in operands(100, 48, dtype))
    transposed, bias = b.t().contiguous(), probe((48,), dtype, seed=2).to(device)
    wide, biased = matmul_nn(a, b), matmul_nt(a, transposed, bias=bias)
    for rows in (1, 40, ROWS):
        part, expected = a[:rows], wide[:rows].to(out_dtype)
        assert same_bytes(matmul_nn(part, b, out_dtype=out_dtype), expected)
        assert same_bytes(matmul_nt(part, transposed, out_dtype=out_dtype), expected)
        found = matmul_nt(part, transposed, bias=bias, out_dtype=out_dtype)
        assert same_bytes(found, biased[:rows].to(out_dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_the_batch_at_any_thread_count(threads):
    before = torch.get_num_threads()
    a, b = operands(512, 768)
    torch.set_num_threads(threads)
    try:
        assert judged(rows_alike, "y", lambda rows: row_matmul(rows, b), a).passed
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_of_any_value_do_not_matter(dtype, device):
    a, b = (x.to(device) for x in operands(100, 33, dtype))
    junk = a.new_tensor([float("nan"), float("inf"), -1e30])[:, None].expand(3, 100)
    padded = matmul_nn(torch.cat([junk, a, junk]), b)
    assert same_bytes(padded[3:-3], matmul_nn(a, b))


def test_a_product_without_elements_is_empty_or_the_bias(device):
    for m, k, n in ((0, 5, 4), (3, 5, 0), (0, 5, 0), (3, 0, 4)):
        a, b = torch.zeros(m, k, device=device), torch.zeros(n, k, device=device)
        bias = torch.arange(float(n), device=device)
        assert same_bytes(matmul_nn(a, b.t()), torch.zeros(m, n, device=device))
        assert same_bytes(matmul_nt(a, b, bias=bias), bias.expand(m, n))


@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_do_not_depend_on_the_other_products(tile):
    a, b = probe((9, tile, 64)), probe((9, 64, 48), seed=1)
    whole = tile_matmul(a, b)
    for index in ([0], [8], [1, 2], [4, 3, 2], list(range(7))):
        assert same_bytes(tile_matmul(a[index], b[index]), whole[index])
