from itertools import product

import pytest
import torch

from rl_consistency.kernels.core.findings import shipped
from rl_consistency.kernels.matmul.schedules import (
    CANDIDATES,
    POINTER,
    POINTER_FP32,
    Schedule,
    pick,
)

SHAPES = ((1024, 1024), (4096, 12288), (262144, 1024), (33, 7), (1, 1))
ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 129, 300, 513, 1025, 4096, 100_000)
SHIPPED = {
    tuple(work.split("/")[1:]): winner.schedule
    for work, winner in shipped().winners.items()
    if work.startswith("matmul/")
}
"""(layout, dtype, dtype of the result, kind, n, k, rows) -> the schedule of a measured product."""

SM90_SHARED = 227 * 1024
SMALLEST_SHARED = 99 * 1024


@pytest.mark.parametrize("table", [CANDIDATES, POINTER_FP32])
def test_names_are_unique_and_say_everything(table):
    assert len({schedule.name for schedule in table}) == len(table)
    assert all(Schedule.named(schedule.name) == schedule for schedule in table)


def test_a_table_holds_what_is_picked_and_nothing_else():
    sizes = sorted({int(size[1:]) for _, _, _, _, *nk, _ in SHIPPED for size in nk})
    rows = (1, 16, 17, 32, 33, 64, 128, 256, 257, 512, 513, 4096)
    found = {
        pick(m, n, k, torch.bfloat16, layout, tma)
        for m, n, k in product(rows, sizes, sizes)
        for layout, tma in (("nt", True), ("nn", True), ("nt", False))
    }
    assert found == set(CANDIDATES)
    assert {pick(m, 1, 1, torch.float32, "nt", True) for m in rows} == set(POINTER_FP32)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("m", ROWS)
def test_every_pick_fits_in_shared_memory(m, n, k, layout):
    schedule = pick(m, n, k, torch.bfloat16, layout, True)
    assert schedule in CANDIDATES and schedule.kind == "tma"
    for out_bytes in (2, 4):
        fitting = schedule.within(SM90_SHARED, 2, out_bytes)
        assert fitting.shared_bytes(2, out_bytes) <= SM90_SHARED
        assert fitting.stages >= 2
    by_pointer = pick(m, n, k, torch.float16, layout, False)
    assert by_pointer in POINTER
    assert by_pointer.shared_bytes(2, 4) <= SMALLEST_SHARED
    fp32 = pick(m, n, k, torch.float32, layout, True)
    assert fp32 in POINTER_FP32 and fp32.shared_bytes(4, 4) <= SMALLEST_SHARED


def test_a_tile_stored_in_fp32_has_room_beside_its_operands():
    tile = Schedule.named("tma-128x128x128-w8-s3")
    assert tile.within(SM90_SHARED, 2, 2).stages == 3
    assert tile.within(SM90_SHARED, 2, 4).stages == 2


def test_a_measured_product_gets_its_schedule_in_all_16_bit_dtypes():
    assert len(SHIPPED) == 182
    for (layout, dtype, out_dtype, kind, *sizes), name in SHIPPED.items():
        n, k, m = (int(size[1:]) for size in sizes)
        assert (dtype, out_dtype, kind) == ("bf16", "bf16", "tma")
        for given in (torch.bfloat16, torch.float16):
            for returned in (given, torch.float32):
                assert pick(m, n, k, given, layout, True, returned).name == name
        assert pick(m, n, k, torch.bfloat16, layout, False).kind == "pointer"
        assert pick(m, n, k, torch.float32, layout, True).kind == "pointer"
