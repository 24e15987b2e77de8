"""The logic of the Triton schedules, in the interpreter: its bits say nothing of a GPU's."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.device import takes_descriptors
from rl_consistency.kernels.gradient_fold.columns_triton import (
    fold_step_sums,
    folded_step_sums,
    gradient_fold_columns,
    step_sums,
)
from rl_consistency.kernels.gradient_fold.op import fold_columns as fold_columns_cpu
from rl_consistency.kernels.gradient_fold.outer_triton import (
    gradient_fold_outer,
    launch_outer,
)
from rl_consistency.kernels.gradient_fold.rows_triton import (
    RowFoldSchedule,
    gradient_fold_rows,
    launch_rows,
    ordered_tokens,
)
from rl_consistency.kernels.gradient_fold.schedules import (
    POINTER,
    TMA,
    WIDE,
    FoldSchedule,
    pick,
)
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no NVIDIA GPU"
)

TOKENS, N, K = 48, 24, 40
SM90_SHARED = 227 * 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = FoldSchedule(kind="pointer", block_n=16, block_k=32, block_t=16, warps=4, stages=2)


def operands(dtype=torch.float32, tokens=TOKENS):
    return probe((tokens, N), dtype), probe((tokens, K), dtype, seed=1)


def outer(dy, x, cuts=(), schedule=SMALL, fresh=False):
    buffer = torch.full((dy.shape[1], x.shape[1]), float("nan") if fresh else 0.0)
    for start, stop in itertools.pairwise([0, *cuts, len(dy)]):
        launch_outer(buffer, dy[start:stop], x[start:stop], fresh, schedule)
    return buffer


@pytest.mark.parametrize("dtype", DTYPES)
def test_outer_matches_fp64(dtype):
    dy, x = operands(dtype, TOKENS - 5)
    buffer = torch.zeros(N, K)
    gradient_fold_outer(buffer, dy, x, False)
    assert_within(buffer, dy.double().t() @ x.double(), "reduction", torch.float32)


def test_a_table_holds_what_is_picked_and_nothing_else():
    sizes = (64, 128, 200, 512, 1024, 2048, 3072, 4096, 12288, 16500, 151936)

    def picked(dtype, tma):
        return {
            pick(tokens, n, k, dtype, tma=tma, processors=processors)
            for tokens in (1, 16, 1024, 16384)
            for n, k in itertools.product(sizes, sizes)
            for processors in (1, 80, 132)
        }

    by_pointer = picked(torch.bfloat16, False)
    assert by_pointer == set(POINTER)
    assert picked(torch.bfloat16, True) | by_pointer == {*TMA, *POINTER}
    assert picked(torch.float32, True) == set(WIDE)


def test_outer_continues_where_it_was_cut():
    dy, x = operands(torch.bfloat16)
    whole = outer(dy, x)
    assert same_bytes(outer(dy, x, [16, 32]), whole)
    assert same_bytes(outer(dy, x, fresh=True), whole)


@pytest.mark.parametrize("schedule", WIDE, ids=str)
def test_an_fp64_buffer_of_fp32_operands_keeps_what_fp32_would_lose(schedule):
    dy = torch.tensor([2.0**30, 1.0, -(2.0**30)]).repeat_interleave(16)[:, None] / 16
    buffer = torch.zeros(1, 16, dtype=torch.float64)
    for start in (0, 16, 32):
        span = slice(start, start + 16)
        launch_outer(buffer, dy[span], torch.ones(16, 16), False, schedule)
    assert (buffer == 1.0).all()


def test_outer_takes_any_strides_of_buffer_and_operands():
    dy, x = operands(torch.bfloat16)
    buffer = torch.zeros(K, N).t()
    gradient_fold_outer(buffer, dy.t().contiguous().t(), torch.cat([x, x], 1)[:, :K], False)
    assert same_bytes(buffer.contiguous(), outer(dy, x))


def test_negative_zero_is_stored_as_positive_zero():
    buffer = torch.full((N, K), -0.0)
    launch_outer(buffer, -torch.zeros(16, N), torch.zeros(16, K), False, SMALL)
    assert same_bytes(buffer, torch.zeros(N, K))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("rows_per_token", "tokens"), [(1, 40), (3, 33), (4, 32)])
def test_columns_have_the_bytes_of_the_cpu(rows_per_token, tokens, dtype):
    """Elementwise additions only: here the interpreter does say something of the order."""
    rows = probe((tokens * rows_per_token, K), torch.bfloat16)
    got, expected = torch.zeros(K, dtype=dtype), torch.zeros(K, dtype=dtype)
    gradient_fold_columns(got, rows, rows_per_token)
    fold_columns_cpu(expected, rows, rows_per_token=rows_per_token)
    assert same_bytes(got, expected)


@pytest.mark.parametrize("rows_per_token", [1, 5])
def test_step_sums_are_halving_trees(rows_per_token):
    step = 16 * rows_per_token
    rows = probe((2 * step, K))
    assert same_bytes(step_sums(rows, rows_per_token), tree_sum(rows.view(2, step, K), dim=1))
    assert not same_bytes(step_sums(rows, rows_per_token), rows.view(2, step, K).sum(1))


def test_step_sums_are_folded_upward():
    sums = probe((70, K))
    got, expected = torch.zeros(K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
    fresh = torch.full((K,), float("nan"), dtype=torch.float64)
    fold_step_sums(got, sums)
    fold_step_sums(fresh, sums, True)
    for row in sums:
        expected += row
    assert same_bytes(got, expected) and same_bytes(fresh, expected)
    for dtype in DTYPES:
        assert same_bytes(folded_step_sums(sums, dtype), expected.float().to(dtype))


RUNS = torch.tensor([3] * 37 + [0, 6, 5, -1, 6, 9] + [4] * 3 + [1, 2, 1] * 4 + [-5, 5] * 2)


@pytest.mark.parametrize("ranked", [False, True])
def test_tokens_of_an_id_stay_in_their_order(ranked):
    index = RUNS[torch.randperm(len(RUNS), generator=torch.Generator().manual_seed(0))]
    ids, tokens = ordered_tokens(index, 7, ranked=ranked)
    for row_id in range(7):
        assert torch.equal(tokens[ids == row_id], (index == row_id).nonzero().flatten())
    assert ((ids.diff() < 0).sum() == 0) and torch.equal(tokens.sort()[0], torch.arange(len(RUNS)))


@pytest.mark.parametrize("ranked", [False, True])
def test_ids_beyond_32_bits_are_left_out(ranked):
    index = torch.tensor([2**32 + 3, 5, -(2**32) + 5, 3, 2**31, 2**31 + 5, 7, -1])
    rows = probe((len(index), K), torch.bfloat16)
    found = probe((7, K), seed=2)
    expected = found.clone()
    expected[5] += rows[1].float()
    expected[3] += rows[3].float()
    launch_rows(found, index, rows, RowFoldSchedule(), ranked=ranked)
    assert same_bytes(found, expected)
    ids, tokens = ordered_tokens(index, 7, ranked=ranked)
    assert ids.tolist() == [3, 5] + [7] * 6
    assert tokens.tolist() == [3, 1, 0, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "schedule",
    [
        RowFoldSchedule(),
        RowFoldSchedule(gap=4, runs=2, block=16, batch=4, narrow=16),
        RowFoldSchedule(gap=16, runs=1, batch=8),
        RowFoldSchedule(gap=2, runs=8),
    ],
    ids=str,
)
def test_every_schedule_of_rows_has_the_bytes_of_token_order(schedule, dtype):
    index = RUNS[torch.randperm(len(RUNS), generator=torch.Generator().manual_seed(1))]
    rows = probe((len(index), K), torch.bfloat16)
    rows[0] = -0.0
    got = probe((7, K), seed=2).to(dtype)
    got[2] = -0.0
    expected = got.clone()
    for token, row in zip(index.tolist(), rows.to(dtype), strict=True):
        if 0 <= token < 7:
            expected[token] += row
    for ranked in (False, True):
        found = got.clone()
        launch_rows(found, index, rows, schedule, ranked=ranked)
        assert same_bytes(found, expected)


def test_rows_of_ids_outside_the_table_are_written_nowhere():
    """The table lies in a larger tensor, whose rows such an id would reach."""
    whole = probe((12, K), seed=2)
    expected = whole.clone()
    index = torch.tensor([5, 0, 4, 8, -2, 4, -1, -4, 5])
    rows = probe((len(index), K), torch.bfloat16)
    for row, token in zip(rows.float(), index.tolist(), strict=True):
        if 0 <= token < 5:
            expected[4 + token] += row
    gradient_fold_rows(whole[4:9], index, rows)
    assert same_bytes(whole, expected)


def test_empty_calls_change_nothing():
    buffer = probe((N, K))
    before = buffer.clone()
    gradient_fold_outer(buffer, torch.zeros(0, N), torch.zeros(0, K), False)
    gradient_fold_rows(buffer, torch.zeros(0, dtype=torch.int64), torch.zeros(0, K))
    gradient_fold_columns(buffer[0], torch.zeros(0, K), 1)
    fold_step_sums(buffer[0], torch.zeros(0, K))
    gradient_fold_outer(torch.zeros(0, K), torch.zeros(16, 0), torch.zeros(16, K), False)
    assert same_bytes(buffer, before)
    for fold in (partial(gradient_fold_columns, rows_per_token=1), fold_step_sums):
        fresh = torch.full((K,), float("nan"), dtype=torch.float64)
        fold(fresh, torch.zeros(0, K), fresh=True)
        assert not fresh.any()


@pytest.mark.parametrize(
    "tile", [{}, {"extra_n": 16}, {"extra_k": 32}, {"extra_n": 16, "persistent": True}], ids=str
)
@pytest.mark.parametrize("fresh", [False, True])
def test_descriptor_tiles_have_the_bytes_of_pointer_ones(tile, fresh):
    """In the interpreter all tiles multiply step by step, each of the 16 tokens at once."""
    schedule = replace(SMALL, kind="tma", **tile)
    dy, x = probe((TOKENS, 56), torch.bfloat16), probe((TOKENS, 72), torch.bfloat16, seed=1)
    assert same_bytes(outer(dy, x, schedule=schedule, fresh=fresh), outer(dy, x))
    if not fresh:
        assert same_bytes(outer(dy, x, [16], schedule), outer(dy, x))


def test_descriptors_of_unaligned_rows_are_refused():
    dy, x = probe((16, 25), torch.bfloat16)[:, 1:], probe((16, K), torch.bfloat16)
    with pytest.raises(ValueError, match=r"16-byte aligned rows.*'pointer' schedule"):
        launch_outer(torch.zeros(24, K), dy, x, False, TMA[0])


def test_descriptors_of_rows_that_overlap_are_refused():
    storage = probe((32 * K,), torch.bfloat16)
    dy = probe((32, N), torch.bfloat16)
    assert takes_descriptors(dy, storage.as_strided((32, K), (K, 1)))
    for stride in (0, 16):
        x = storage.as_strided((32, K), (stride, 1))
        assert not takes_descriptors(dy, x)
        with pytest.raises(ValueError, match=r"'pointer' schedule"):
            launch_outer(torch.zeros(N, K), dy, x, False, TMA[0])
        buffer = torch.zeros(N, K)
        gradient_fold_outer(buffer, dy, x, False)
        assert same_bytes(buffer, outer(dy, x.clone()))


def test_tables_hold_what_a_multiprocessor_can():
    for schedule in (*TMA, *POINTER, *WIDE):
        assert schedule.block_t % 16 == 0
        tile_n, tile_k = schedule.tile
        accumulators = tile_n * tile_k // (schedule.warps * 32)
        assert accumulators + 24 <= (schedule.registers or 255), schedule
        size = 4 if schedule in WIDE else 2
        operands = (tile_n + tile_k) * schedule.block_t * size * schedule.stages
        assert operands * schedule.resident <= SM90_SHARED, schedule
