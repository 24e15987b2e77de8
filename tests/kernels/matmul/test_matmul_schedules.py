from itertools import product

import pytest
import torch

from rl_consistency.kernels.matmul import schedules as matmul_schedules
from rl_consistency.kernels.matmul.schedules import (
    CANDIDATES,
    FEW_ROWS_FP32,
    FUSED_ROWS,
    GATE_UP,
    MAX_BUCKET,
    POINTER_FP32,
    QKV,
    Entry,
    Schedule,
    bucket,
    pick,
    pick_gate_up,
    pick_qkv,
    prefers_library,
)
from rl_consistency.kernels.matmul.table import MEASURED

SHAPES = ((1024, 1024), (4096, 12288), (151936, 1024), (33, 7))
ROWS = (1, 2, 16, 17, 33, 64, 65, 300, 513, 4096, 100_000)
SM90_SHARED = 227 * 1024
SMALLEST_SHARED = 99 * 1024


@pytest.mark.parametrize("table", [CANDIDATES, POINTER_FP32, QKV, GATE_UP, FEW_ROWS_FP32])
def test_names_are_unique_and_say_everything(table):
    assert len({schedule.name for schedule in table}) == len(table)
    assert all(Schedule.named(schedule.name) == schedule for schedule in table)


def test_a_table_holds_what_is_picked_and_nothing_else():
    sizes = sorted({n for _, _, n, *_ in MEASURED} | {k for _, _, _, k, *_ in MEASURED})
    rows = (1, 16, 17, 32, 33, 64, 128, 256, 257, 512, 513, 4096)
    found = {
        pick(m, n, k, torch.bfloat16, layout, tma)
        for m, n, k in product(rows, sizes, sizes)
        for layout, tma in (("nt", True), ("nn", True), ("nt", False))
    }
    assert found == set(CANDIDATES)
    few = range(1, FUSED_ROWS + 1)
    assert {pick(m, 1, 1, torch.float32, "nt", True) for m in rows} == set(POINTER_FP32)
    assert {pick_qkv(m, torch.bfloat16) for m in few} == set(QKV)
    assert {pick_qkv(m, torch.float32) for m in few} == set(FEW_ROWS_FP32)
    found = {
        pick_gate_up(m, n, torch.bfloat16, tma)
        for m, n, tma in product(few, (1024, 8192), (True, False))
    }
    assert found == set(GATE_UP)
    assert {pick_gate_up(m, 1024, torch.float32, True) for m in few} == set(FEW_ROWS_FP32)


@pytest.mark.parametrize("m, expected", [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_rows_fall_into_buckets(m, expected):
    assert bucket(m) == expected
    assert bucket(10**6) == MAX_BUCKET


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_every_pick_fits_in_shared_memory(m, n, k, layout):
    schedule = pick(m, n, k, torch.bfloat16, layout, True)
    for out_bytes in (2, 4):
        fitting = schedule.within(SM90_SHARED, 2, out_bytes)
        assert fitting.shared_bytes(2, out_bytes) <= SM90_SHARED
        assert fitting.stages >= 2
    by_pointer = pick(m, n, k, torch.float16, layout, False)
    assert by_pointer.kind == "pointer"
    assert by_pointer.shared_bytes(2, 4) <= SMALLEST_SHARED
    fp32 = pick(m, n, k, torch.float32, layout, True)
    assert fp32.kind == "pointer" and fp32.shared_bytes(4, 4) <= SMALLEST_SHARED


def test_a_tile_stored_in_fp32_has_room_beside_its_operands():
    tile = Schedule.named("tma-128x128x128-w8-s3")
    assert tile.within(SM90_SHARED, 2, 2).stages == 3
    assert tile.within(SM90_SHARED, 2, 4).stages == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 16, 17, 33, 64])
def test_fused_picks_fit_in_shared_memory(m, dtype):
    size = dtype.itemsize
    assert pick_qkv(m, dtype).shared_bytes(size, size) <= SMALLEST_SHARED
    for n in (1024, 12288):
        by_pointer = pick_gate_up(m, n, dtype, False)
        assert by_pointer.kind == "pointer"
        assert pick_gate_up(m, n, dtype, True).kind == (
            "tma" if dtype == torch.bfloat16 else "pointer"
        )
    assert all(s.kind == "pointer" for s in (*QKV, *FEW_ROWS_FP32))


def test_a_measured_shape_is_picked_and_stands_for_its_neighbours(monkeypatch):
    first, second = CANDIDATES[0], CANDIDATES[1]
    entries = [Entry(1024, 1024, first, True), Entry(8192, 4096, second)]
    monkeypatch.setattr(matmul_schedules, "TABLE", {("nt", 64): entries})
    uncached, preferred = pick.__wrapped__, prefers_library.__wrapped__
    assert uncached(50, 1024, 1024, torch.bfloat16, "nt", True) is first
    assert uncached(50, 1500, 1024, torch.bfloat16, "nt", True) is first
    assert uncached(64, 12288, 4096, torch.bfloat16, "nt", True) is second
    # dX takes the forward's entries while it has none of its own.
    assert uncached(64, 12288, 4096, torch.bfloat16, "nn", True) is second
    assert preferred(50, 1024, 1024, torch.bfloat16, "nt")
    assert not preferred(50, 8192, 4096, torch.bfloat16, "nt")
    assert not preferred(1, 1024, 1024, torch.bfloat16, "nt")
