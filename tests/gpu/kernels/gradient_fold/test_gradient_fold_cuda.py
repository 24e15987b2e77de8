"""The gradient fold on a GPU: one result, whatever the schedule and wherever the cut."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.gradient_fold.columns_triton import folded_step_sums, launch_steps
from rl_consistency.kernels.gradient_fold.op import (
    fold_columns,
    fold_outer,
    fold_rows,
    fold_step_sums,
)
from rl_consistency.kernels.gradient_fold.outer_triton import launch_outer
from rl_consistency.kernels.gradient_fold.schedules import TMA
from tests.gpu.kernels.gradient_fold.gradient_fold_cases import (
    DTYPES,
    TOKENS,
    VOCABULARY,
    K,
    N,
    data,
    operands,
    same_bytes,
)

pytestmark = pytest.mark.gpu


def index():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    ids[::3] = 5
    ids[::50] = -1
    return ids.cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 32, 64])
def test_columns_have_the_bytes_of_the_cpu(heads, dtype):
    """Where an order consists of additions alone, the device makes no difference."""
    rows = data((1000 * heads, N), dtype)
    got = torch.zeros(N, dtype=torch.float64, device="cuda")
    expected = torch.zeros(N, dtype=torch.float64)
    fold_columns(got, rows, rows_per_token=heads)
    fold_columns(expected, rows.cpu(), rows_per_token=heads)
    assert same_bytes(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bytes_of_the_cpu(dtype):
    ids, rows = index()[:1000], data((1000, N), dtype)
    got, expected = data((VOCABULARY, N), torch.float32), probe((VOCABULARY, N))
    fold_rows(got, ids, rows)
    fold_rows(expected, ids.cpu(), rows.cpu())
    assert same_bytes(got, expected)


@pytest.mark.parametrize("columns", [100, 1000])
@pytest.mark.parametrize("steps", [1, 63, 64, 1025])
def test_step_sums_are_folded_upward_in_any_batches(steps, columns):
    sums = data((steps, columns), torch.float32)
    for dtype in (torch.float64, torch.float32):
        got, expected = torch.zeros(columns, dtype=dtype), torch.zeros(columns, dtype=dtype)
        for row in sums.cpu():
            expected += row
        for batch in (16, 64, 128):
            found = got.cuda()
            launch_steps(found, sums, fresh=False, batch=batch)
            assert same_bytes(found, expected)
        fold_step_sums(found := got.cuda(), sums)
        assert same_bytes(found, expected)
        if dtype == torch.float64:
            fold_step_sums(found.fill_(float("nan")), sums, fresh=True)
            assert same_bytes(found, expected)
            for narrow in DTYPES:
                assert same_bytes(folded_step_sums(sums, narrow), expected.float().to(narrow))


def test_repeated_ids_are_added_in_token_order():
    ids, rows = index(), data((TOKENS, K))
    got = torch.zeros(VOCABULARY, K, device="cuda")
    fold_rows(got, ids, rows)
    expected = torch.zeros(VOCABULARY, K)
    for token, row in zip(ids.tolist(), rows.cpu().float(), strict=True):
        if token >= 0:
            expected[token] += row
    assert same_bytes(got, expected)
    reversed_ = torch.zeros_like(got)
    fold_rows(reversed_, ids.flip(0), rows.flip(0))
    assert not same_bytes(got, reversed_)


def test_empty_calls_change_nothing():
    buffer = data((N, K), torch.float32)
    before = buffer.clone()
    fold_outer(buffer, buffer.new_zeros(0, N), buffer.new_zeros(0, K))
    fold_columns(buffer[0], buffer.new_zeros(0, K))
    fold_rows(buffer, torch.zeros(0, dtype=torch.int64, device="cuda"), buffer.new_zeros(0, K))
    fold_outer(buffer[:0], buffer.new_zeros(16, 0), buffer.new_zeros(16, K))
    assert same_bytes(buffer, before)
    fold_outer(buffer, buffer.new_zeros(0, N), buffer.new_zeros(0, K), fresh=True)
    assert same_bytes(buffer, torch.zeros_like(buffer))


def test_running_out_of_memory_leaves_the_gradient_as_it_was():
    dy, x = operands(tokens=65536)
    scattered = dy.t().contiguous().t()
    outer_buffer = data((N, K), torch.float32)
    table = data((VOCABULARY, N), torch.float32)
    columns = torch.zeros(N, dtype=torch.float64, device="cuda")
    before = [b.clone() for b in (outer_buffer, table, columns)]
    ids = index().repeat(64)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    filler = []
    try:
        # What the allocator holds in part would serve a small temporary.
        for size in (1 << 22, 1 << 18, 1 << 12):
            with pytest.raises(torch.cuda.OutOfMemoryError):
                while True:
                    filler.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        for run in (
            lambda: fold_outer(outer_buffer, scattered, x),
            lambda: fold_rows(table, ids, scattered),
            lambda: fold_columns(columns, scattered),
        ):
            with pytest.raises(torch.cuda.OutOfMemoryError):
                run()
    finally:
        filler.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    for buffer, was in zip((outer_buffer, table, columns), before, strict=True):
        assert same_bytes(buffer, was)


def test_bad_operands_are_refused():
    dy, x = operands()
    with pytest.raises(
        TypeError, match=r"gradient_fold: x is torch.float16 but dy is torch.bfloat16"
    ):
        fold_outer(torch.zeros(N, K, device="cuda"), dy, x.half())
    with pytest.raises(ValueError, match=r"gradient_fold: x is on cpu but dy is on cuda"):
        fold_outer(torch.zeros(N, K, device="cuda"), dy, x.cpu())
    if has_tma(dy.device):
        with pytest.raises(ValueError, match=r"16-byte aligned rows.*'pointer' schedule"):
            launch_outer(torch.zeros(N, K - 1, device="cuda"), dy, x[:, 1:], False, TMA[0])
