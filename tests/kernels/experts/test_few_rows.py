"""The kernels of few rows: the bytes of rows sorted by expert, and the schedules that they get."""

from dataclasses import replace

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.experts import cuda, few_rows_triton
from rl_consistency.kernels.experts.few_rows_triton import few_rows_fwd
from rl_consistency.kernels.experts.schedules import (
    FEW,
    MOST_FEW,
    MOST_TOP_K,
    FewSchedule,
    pick_few,
)
from rl_consistency.kernels.router.op import route
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.experts.cases import TOP_K, parameters

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
EXPERTS, HIDDEN, WIDTH = 6, 68, 300
"""Sizes that no tile divides, and that take several tiles and steps."""
SMALLEST_SHARED, LARGEST_SHARED = 99 << 10, 227 << 10
FITTED = FEW[0].fitted(5 * TOP_K, next_power_of_2(TOP_K), HIDDEN, WIDTH)


def case(rows, dtype=BF16):
    """x, ids, weights, gate_up and down."""
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH}
    router, gate_up, down = (w.detach() for w in parameters(dtype, **sizes))
    x = probe((rows, HIDDEN), dtype, scale=0.025)
    ids, weights = route(x, router, TOP_K, normalize=True)
    return x, ids, weights, gate_up, down


def both(x, ids, weights, gate_up, down, layout):
    """y of the kernels of few rows and of those that find pairs."""
    given = x, ids, weights, gate_up, down, layout, "silu"
    few, _, none = cuda.experts_fwd(*given, False)
    recorded, packed, routed = cuda.experts_fwd(*given, True)
    assert none is None and routed is not None and len(packed) == ids.numel()
    return few, recorded


@interpreted
@pytest.mark.parametrize(
    "schedule, dtype",
    [(FEW[0], BF16), (FEW[1], torch.float16), (FEW[2], BF16), (FITTED, BF16)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_few_rows_have_the_bytes_of_rows_sorted_by_expert(schedule, dtype):
    x, ids, weights, gate_up, down = case(5, dtype)
    weights[3, 1] = -0.0
    ids[1], ids[2, TOP_K - 1] = ids[1].flip(0), EXPERTS
    layout = PackedSequences.of([0, 1], [1, 3])  # row 4 is filler
    numbers = layout.tables(CPU)
    given = x, ids, weights, gate_up, down
    y = few_rows_fwd(*given, numbers.query_start, numbers.tokens, "silu", schedule)
    recorded, *_ = cuda.experts_fwd(*given, layout, "silu", True)
    assert same_bytes(y, recorded)
    assert y[[1, 2]].isnan().all() and y[[0, 3]].isfinite().all() and not y[4].any()


@interpreted
def test_a_row_of_negative_zeros_keeps_its_sign():
    """A sum that began at 0 would lose it, or zeros added in place of other experts."""
    x, ids, _, gate_up, down = case(1)
    x, weights = torch.full_like(x, -0.0), -torch.ones(1, TOP_K)
    few, recorded = both(x, ids, weights, gate_up, down.abs(), PackedSequences.of([0], [1]))
    assert few.signbit().all() and same_bytes(few, recorded)


@interpreted
def test_few_rows_add_up_by_ascending_expert():
    """Of equal results b, (2^26 b - 2^26 b) + b is b, and from the other end it is 0."""
    x, _, _, *experts = case(1)
    gate_up, down = (w[:1].expand_as(w).contiguous() for w in experts)
    ids = torch.arange(TOP_K, dtype=torch.int32)[None]
    weights = torch.tensor([[2.0**26, -(2.0**26), 1.0]])
    few, recorded = both(x, ids, weights, gate_up, down, PackedSequences.of([0], [1]))
    assert few.any() and same_bytes(few, recorded)


@interpreted
def test_stages_are_as_many_as_fit_the_device(monkeypatch):
    asked = []
    within = FewSchedule.within
    monkeypatch.setattr(few_rows_triton, "shared_memory", lambda device: SMALLEST_SHARED)
    monkeypatch.setattr(FewSchedule, "within", lambda s, n: asked.append(n) or within(s, n))
    x, ids, weights, gate_up, down = case(1)
    few_rows_fwd(x, ids, weights, gate_up, down, ids.new_zeros(1), ids.new_ones(1), "silu")
    assert asked == [SMALLEST_SHARED]


@pytest.mark.parametrize("top_k, dtype", [(MOST_TOP_K + 1, BF16), (1, torch.float32)])
def test_what_the_kernels_of_few_rows_cannot_take_is_refused_and_not_picked(top_k, dtype):
    assert pick_few(1, top_k, 64, 128, 96, dtype) is None
    x, ids = torch.zeros(1, 16, dtype=dtype), torch.arange(top_k, dtype=torch.int32)[None]
    weights = torch.ones(ids.shape)
    experts = x.new_zeros(top_k, 32, 16), x.new_zeros(top_k, 16, 16)
    with pytest.raises(ValueError, match="at most 16"):
        few_rows_fwd(x, ids, weights, *experts, ids[0, :1], ids[0, :1] + 1, "silu")


def test_few_rows_are_picked_up_to_a_number_of_rows():
    sizes = 8, 128, 2048, 768, BF16
    assert pick_few(MOST_FEW + 1, *sizes) is None
    name = "pointer-16x32x128-w4-s5+pointer-16x128x128-w4-s4"
    assert pick_few(1, *sizes).name == pick_few(MOST_FEW, *sizes).name == name


@pytest.mark.parametrize("top_k", range(1, MOST_TOP_K + 1))
def test_tiles_are_whole_and_fit_the_smallest_shared_memory(top_k):
    slots = next_power_of_2(top_k)
    for hidden in (8, 640, 2048, 2880, 8192):
        for width in (8, 768, 14336):
            for entry in FEW:
                schedule = entry.fitted(top_k, slots, hidden, width)
                gate_up, down = schedule.gate_up, schedule.down
                assert down.block_n % slots == 0 and down.block_n >= 16 <= gate_up.block_n
                assert down.block_n * down.block_k <= entry.down.block_n * entry.down.block_k
                programs = cdiv(hidden, down.block_n // slots)
                narrowest = down.block_n == max(8 * slots, 16)
                assert programs > 64 or narrowest
                small = schedule.within(SMALLEST_SHARED)
                for tile, weights in ((small.gate_up, 2), (small.down, 1)):
                    stage = 2 * (16 + weights * tile.block_n) * tile.block_k
                    assert tile.stages >= 2 and tile.stages * stage <= SMALLEST_SHARED
                assert schedule.within(LARGEST_SHARED) == schedule
                stages = replace(small.down, stages=down.stages)
                assert stages == down  # nothing else was changed
