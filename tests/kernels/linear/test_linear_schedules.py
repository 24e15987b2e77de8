"""Fused products: every schedule is picked somewhere, and no launch takes more than it has."""

from itertools import product

import pytest
import torch

from rl_consistency.kernels.linear.schedules import (
    FEW_ROWS_FP32,
    FUSED_ROWS,
    GATE_UP,
    MOST_FUSED_ROWS,
    QKV,
    fuses_gate_up,
    fuses_qkv,
    pick_gate_up,
    pick_qkv,
)
from rl_consistency.kernels.matmul.product_triton import SHARED_BYTES

SMALLEST_SHARED, RESERVED = 99 * 1024, 1024
BF16, FP32 = torch.bfloat16, torch.float32
SMALL, LARGE = (896, 128, 128), (4096, 1024, 1024)
"""Columns of q, k and v of Qwen2.5-0.5B and of Qwen3-8B."""
WIDTHS = (1024, 3072, 8192, 12288, 18944)
"""Columns of gate, with tiles for less than a multiprocessor each up to more than three."""


def test_a_table_holds_what_is_picked_and_nothing_else():
    rows = range(1, MOST_FUSED_ROWS + 1)
    assert {pick_qkv(m, BF16, c) for m, c in product(rows, (SMALL, LARGE))} == set(QKV)
    found = {
        pick_gate_up(m, n, BF16, tma)
        for m, n, tma in product(rows, WIDTHS, (True, False))
        if fuses_gate_up(m, n, BF16, tma)
    }
    assert found == set(GATE_UP)
    few = range(1, FUSED_ROWS + 1)
    assert {pick_qkv(m, FP32) for m in few} == set(FEW_ROWS_FP32)
    assert {pick_gate_up(m, 1024, FP32, True) for m in few} == set(FEW_ROWS_FP32)


def gate_up_stage(schedule, size):
    """Bytes of a stage of gate and up: a tile of x and two of weights."""
    return (schedule.block_m + 2 * schedule.block_n) * schedule.block_k * size


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("m", [1, 16, 17, 33, 64, 100, 256])
def test_fused_picks_fit_in_shared_memory(m, dtype):
    size = dtype.itemsize
    for columns in (SMALL, LARGE):
        assert pick_qkv(m, dtype, columns).shared_bytes(size, size) <= SMALLEST_SHARED
    for n in WIDTHS:
        by_pointer = pick_gate_up(m, n, dtype, False)
        assert by_pointer.kind == "pointer"
        assert by_pointer.stages * gate_up_stage(by_pointer, size) + RESERVED <= SMALLEST_SHARED
        described = dtype == BF16 and m > 16
        assert pick_gate_up(m, n, dtype, True).kind == ("tma" if described else "pointer")
    assert all(s.kind == "pointer" for s in (*QKV, *FEW_ROWS_FP32))


def test_few_rows_are_fused_and_more_rows_where_their_tiles_run_at_once():
    for columns, dtype in product((SMALL, LARGE), (BF16, FP32)):
        assert fuses_qkv(FUSED_ROWS, columns, dtype)
    assert fuses_qkv(MOST_FUSED_ROWS, SMALL, BF16) and not fuses_qkv(257, SMALL, BF16)
    assert not fuses_qkv(MOST_FUSED_ROWS, LARGE, BF16) and not fuses_qkv(65, SMALL, FP32)
    assert fuses_gate_up(FUSED_ROWS, 12288, FP32, tma=False)
    assert fuses_gate_up(MOST_FUSED_ROWS, 4864, BF16, tma=True)
    assert not fuses_gate_up(257, 4864, BF16, tma=True)
    assert not fuses_gate_up(65, 4864, BF16, tma=False)
    for m, n, fused in (
        (128, 12288, True),
        (129, 12288, False),
        (128, 14336, True),
        (256, 8192, True),
        (256, 8960, False),
    ):
        assert fuses_gate_up(m, n, BF16, tma=True) == fused


@pytest.mark.parametrize("m", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("n", WIDTHS)
def test_fused_tiles_of_gate_and_up_run_at_once(m, n):
    """Tiles left over for a second wave read their weights while most of the GPU waits."""
    schedule = pick_gate_up(m, n, BF16, True)
    # Triton keeps one stage less than it is given.
    held = (schedule.stages - 1) * gate_up_stage(schedule, 2)
    resident = SHARED_BYTES // (held + RESERVED)
    tiles = -(-n // schedule.block_n) * -(-m // schedule.block_m)
    assert not fuses_gate_up(m, n, BF16, tma=True) or tiles <= resident * 132
