from itertools import product

import pytest
import torch

from rl_consistency.kernels.matmul import schedules as matmul_schedules
from rl_consistency.kernels.matmul.schedules import (
    CANDIDATES,
    POINTER,
    POINTER_FP32,
    Entry,
    Schedule,
    expected_us,
    fitting,
    pick,
    prefers_library,
)
from rl_consistency.kernels.matmul.table import MEASURED

SHAPES = ((1024, 1024), (4096, 12288), (151936, 1024), (33, 7))
ROWS = (1, 2, 16, 17, 33, 64, 65, 300, 513, 4096, 100_000)
SM90_SHARED = 227 * 1024
SMALLEST_SHARED = 99 * 1024


@pytest.mark.parametrize("table", [CANDIDATES, POINTER_FP32])
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
    assert {pick(m, 1, 1, torch.float32, "nt", True) for m in rows} == set(POINTER_FP32)


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


ENTRIES = [Entry(1024, 1024, CANDIDATES[0], True), Entry(8192, 4096, CANDIDATES[1])]


@pytest.fixture
def measured(monkeypatch):
    """A table of two entries at 64 rows; `pick` and `prefers_library` without their caches."""
    monkeypatch.setattr(matmul_schedules, "TABLE", {("nt", 64): ENTRIES})
    return pick.__wrapped__, prefers_library.__wrapped__


@pytest.mark.parametrize("m, n, k", [(64, 1024, 1024), (61, 1024, 1024), (64, 1040, 1000)])
def test_a_measured_shape_is_picked_and_stands_for_those_near(measured, m, n, k):
    picked, preferred = measured
    assert picked(m, n, k, torch.bfloat16, "nt", True) is CANDIDATES[0]
    assert preferred(m, n, k, torch.bfloat16, "nt")
    assert picked(m, 8 * n, 4 * k, torch.bfloat16, "nt", True) is CANDIDATES[1]
    assert not preferred(m, 8 * n, 4 * k, torch.bfloat16, "nt")


@pytest.mark.parametrize(
    "m, n, k, layout",
    [
        (64, 1024, 1024, "nn"),
        (56, 1024, 1024, "nt"),
        (65, 1024, 1024, "nt"),
        (64, 1152, 1024, "nt"),
        (64, 1024, 896, "nt"),
        (64, 1024, 4096, "nt"),
    ],
)
def test_a_measured_shape_says_nothing_of_one_farther_away(measured, m, n, k, layout):
    picked, preferred = measured
    cheapest = min(fitting(m), key=lambda s: expected_us(s, m, n, k))
    assert cheapest not in (CANDIDATES[0], CANDIDATES[1])
    assert picked(m, n, k, torch.bfloat16, layout, True) is cheapest
    assert not preferred(m, n, k, torch.bfloat16, layout)


def test_a_shape_measured_for_16_rows_stands_for_fewer(monkeypatch):
    entries = {("nt", 16): [Entry(1024, 1024, CANDIDATES[0])]}
    monkeypatch.setattr(matmul_schedules, "TABLE", entries)
    for m in (1, 2, 9, 16):
        found = pick.__wrapped__(m, 1024, 1024, torch.bfloat16, "nt", True)
        assert found is CANDIDATES[0]


def test_a_schedule_that_was_not_fitted_has_no_cost():
    with pytest.raises(KeyError):
        expected_us(POINTER[0], 64, 1024, 1024)


ODD_ROWS = (1, 2, 7, 16, 17, 31, 33, 64, 65, 100, 129, 333, 1000, 1024, 1025, 5000, 16384, 99999)
ODD_SIZES = (1, 7, 64, 100, 576, 1000, 2047, 4104, 29696, 262144)


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_only_candidates_are_picked_whatever_the_shape(layout):
    tables = {
        (torch.bfloat16, True): {s for s in CANDIDATES if s.kind == "tma"},
        (torch.float16, False): set(POINTER),
        (torch.float32, True): set(POINTER_FP32),
    }
    for (dtype, tma), table in tables.items():
        found = {
            pick(m, n, k, dtype, layout, tma) for m, n, k in product(ODD_ROWS, ODD_SIZES, ODD_SIZES)
        }
        assert found <= table


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_the_library_is_never_preferred_in_fp32_nor_for_16_rows(layout):
    for m, n, k in product(ODD_ROWS, ODD_SIZES, ODD_SIZES):
        assert not prefers_library(m, n, k, torch.float32, layout)
        assert m > 16 or not prefers_library(m, n, k, torch.bfloat16, layout)


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_a_measured_weight_never_gives_16_rows_to_the_library(layout):
    """As the test above, at the weights of the table."""
    for _, _, n, k, *_ in MEASURED:
        assert not any(prefers_library(m, n, k, torch.bfloat16, layout) for m in range(1, 17))
