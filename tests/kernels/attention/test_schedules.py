"""Which schedule of attention a call gets, how its tiles are dealt, which kernel that is, and how
the kernel reads a cut."""

import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels.attention import forward_triton
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.hopper import decode
from rl_consistency.kernels.attention.hopper.decode import REGISTERS, shared_bytes
from rl_consistency.kernels.attention.layout import PackedSequences, SharedRun
from rl_consistency.kernels.attention.schedules import (
    DECODE_CROWDED,
    DECODE_DEEP,
    DECODE_LAST,
    DECODE_POINTERS,
    DECODE_SPREAD,
    NARROWEST,
    PREFILL_DESCRIPTORS,
    PREFILL_HOPPER,
    PREFILL_WIDE_DESCRIPTORS,
    Cut,
    decode_cut,
    key_block,
    padded,
    plan_forward,
    programs_for,
    reads_once,
    seen_blocks,
    slices_for,
)
from tests.kernels.attention.layouts import paged

MULTIPROCESSORS = 132
SHARED, RESERVED = 228 << 10, 1 << 10
"""Bytes of shared memory of an sm_90 multiprocessor, and what it keeps for each program."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """An H200, by what it says of itself."""
    monkeypatch.setattr(attention_schedules, "sm_count", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(attention_schedules, "has_wgmma", lambda device: True)


def call_of(contexts, queries=1, heads=32, head_dim=128, dtype=torch.bfloat16):
    """q, k, v and the layout of a decode call."""
    q = torch.empty(len(contexts) * queries, heads, head_dim, dtype=dtype)
    cache = torch.empty(16, 8, head_dim, dtype=dtype)
    return q, cache, cache, paged(contexts, queries)


def picked(contexts, *sizes, **named):
    return plan_forward(*call_of(contexts, *sizes, **named)).schedule


def cut_of(contexts, **how):
    tiles = 8 * len(contexts)
    return decode_cut(paged(contexts), tiles, 4, 128, MULTIPROCESSORS, **how)


def test_long_tiles_shared_by_programs_are_folded_in_slices():
    for contexts in ([32768], [8192] * 4, [8192, 1, 1, 1], [8192] * 8):
        assert picked(contexts) == DECODE_SPREAD


@pytest.mark.parametrize(
    ("head_dim", "ring"), [(64, DECODE_DEEP), (112, DECODE_DEEP), (128, DECODE_LAST)]
)
def test_narrow_heads_with_at_most_a_tile_for_each_multiprocessor_take_a_deep_ring(head_dim, ring):
    assert picked([8192] * 16, head_dim=head_dim) == picked([384] * 16, head_dim=head_dim) == ring
    assert picked([8192] * 4, queries=5, head_dim=head_dim) == ring


def test_tiles_of_sequences_that_share_keys_are_divided_only_to_fill_the_device():
    contexts = [3000] * 72
    assert cut_of(contexts, read_once=True) == Cut.even(576, 1)
    assert cut_of(contexts, read_once=False) == Cut(528, 792)


def test_divided_heads_of_64_that_fill_the_device_more_than_twice_run_three_at_a_time():
    assert picked([3000] * 6, head_dim=64) == DECODE_CROWDED
    assert picked([3000] * 6) == DECODE_LAST


@pytest.mark.parametrize("head_dim", [48, 80, 128, 144, 256])
def test_heads_of_48_to_256_are_prefilled_with_specialised_warps_where_rows_are_aligned(
    head_dim, monkeypatch
):
    monkeypatch.setattr(attention_schedules, "has_tma", lambda device: True)
    monkeypatch.setattr(attention_schedules, "shared_memory", lambda device: SHARED - RESERVED)
    layout = PackedSequences.of([0, 300], [300, 40])

    def picks(padding):
        rows = torch.empty(340, 8, head_dim + padding, dtype=torch.bfloat16)
        q, k, v = rows[..., :head_dim], rows[:, :2, :head_dim], rows[:, :2, :head_dim]
        return plan_forward(q, k, v, layout).schedule

    others = PREFILL_WIDE_DESCRIPTORS if head_dim > 128 else PREFILL_DESCRIPTORS
    assert picks(0) == picks(16) == PREFILL_HOPPER
    # 16 bytes from line to line: their addresses are not seen as aligned.
    assert picks(8) == others


def test_blocks_that_would_take_too_much_memory_are_not_shared(monkeypatch):
    assert programs_for(8, 256, 4, 128, 132) == 16
    monkeypatch.setattr(attention_schedules, "SPLIT_BYTES", 8 * 256 * 4 * 137 * 4 - 1)
    assert programs_for(8, 256, 4, 128, 132) == 1
    assert picked([32768]) == DECODE_LAST
    assert cut_of([32768], read_once=False) == Cut.even(8, 1)


@pytest.mark.parametrize("dim", [64, 128])
def test_slices_are_folded_only_where_the_whole_launch_fits_the_device(dim):
    for grid in range(1, 140):
        for programs in range(1, 140):
            slices = slices_for(Cut.even(grid, programs), grid, dim, MULTIPROCESSORS)
            assert slices == 1 or grid * programs <= MULTIPROCESSORS
            assert 1 <= slices <= programs and dim % slices == 0 and dim // slices >= NARROWEST

    def slices(*cut):
        return slices_for(Cut(*cut), 8, dim, MULTIPROCESSORS)

    assert [slices(0, 8 * n) for n in (2, 3, 8, 17)] == [2, 2, 8, 1]
    assert slices(0, 8 * 16) == slices(0, MULTIPROCESSORS) == min(16, dim // NARROWEST)
    assert slices(0, 8 * 4 - 1) == 2 and slices(1, 100) == 1


def test_a_window_leaves_blocks_out_of_the_cut():
    contexts = [8192] * 20
    assert cut_of(contexts, read_once=False) == Cut(0, 528)
    assert cut_of(contexts, window=1024, read_once=False) == Cut.even(160, 1)
    layout = paged(contexts)
    assert seen_blocks(8192, layout, 128, None) == 64
    assert seen_blocks(8192, layout, 128, 1024) == 9 and seen_blocks(8192, layout, 128, 1) == 1
    assert seen_blocks(100, layout, 128, 1024) == 1


def test_a_cut_that_would_not_be_used_is_refused():
    for choice in ({"schedule": DECODE_POINTERS}, {"programs_per_tile": 2}):
        with pytest.raises(ValueError, match="a ring of buffers needs|a cut says how many"):
            plan_forward(*call_of([512, 512]), cut=Cut.even(16, 1), **choice)


def test_plans_of_one_kernel_differ_in_what_is_no_part_of_it():
    def kernel(contexts, dtype=torch.bfloat16, queries=1):
        return plan_forward(*call_of(contexts, queries, dtype=dtype)).kernel

    assert kernel([8192] * 9) == kernel([8000] * 9) == kernel([8192, 7000] * 5)
    whole, divided, sliced, both = ([300] * 9, [8192] * 9, [32768], [3000] * 72)
    found = {kernel(contexts) for contexts in (whole, divided, sliced, both)}
    assert len(found) == 4
    assert kernel([32768]) != kernel([32768] * 2), "other slices"
    assert kernel([300] * 9) != kernel([300] * 9, queries=2), "other stored rows"
    fp32 = {kernel([n], torch.float32) for n in (300, 2000, 2048, 4096, 9000)}
    assert len(fp32) == 4, "one program, and three widths of the scan"
    assert kernel([2000], torch.float32) != kernel([2000], torch.float32, queries=2)


def test_only_calls_that_share_keys_and_have_no_window_leave_keys_to_another_kernel():
    _, k, _, layout = call_of([512, 512])
    assert not reads_once(k, layout, None)
    shares = replace(layout, shared_runs=[SharedRun(0, 2, 256)])
    assert reads_once(k, shares, None) and not reads_once(k, shares, 100)
    assert not reads_once(k.float(), shares, None)
    assert not reads_once(k, PackedSequences.of([0], [5]), None)


def test_programs_that_share_a_tile_keep_its_factors_in_tensors_of_their_own(monkeypatch):
    """Triton compiles another kernel for an address that is not on 16 bytes."""
    launched = {}
    for name in ("attention_block_kernel", "attention_combine_kernel"):
        kernel = defaultdict(lambda name=name: lambda *a, **_: launched.update({name: a}))
        monkeypatch.setattr(forward_triton, name, kernel)
    q, cache = torch.empty(1, 3, 32), torch.empty(16, 3, 32)
    attention_fwd(q, cache, cache, paged([1300]), 1.0, None, programs_per_tile=2)
    operands = [x for x in launched["attention_combine_kernel"] if isinstance(x, torch.Tensor)]
    sums = [x for x in operands if x.is_floating_point()]
    assert len(sums) == 7 and all(x.data_ptr() % 16 == 0 for x in sums)


RESIDENT = [
    *((DECODE_SPREAD, 2, dim) for dim in (64, 128, 256)),
    *((DECODE_LAST, 2, dim) for dim in (64, 128, 256)),
    *((DECODE_DEEP, 1, dim) for dim in (64, 128, 256)),
    *((DECODE_CROWDED, 3, dim) for dim in (64,)),
]
"""Rings, and how many of their programs the cuts of decode count on, by columns of a head."""


@pytest.mark.parametrize("schedule, resident, dim", RESIDENT)
def test_programs_that_share_tiles_fit_a_multiprocessor_together(schedule, resident, dim):
    """Some wait for others, which must run then; ring and fold do not live at the same time."""
    threads = 32 * schedule.warps
    # The hardware gives registers to a thread by eight.
    registers = -(-min(REGISTERS // schedule.resident, 255) // 8) * 8
    assert resident * threads * registers <= 1 << 16
    for slices in (1, 2, 4, 8, 16):
        for stored in (1, 2, 4, 8, 16):
            if padded(dim) // slices < NARROWEST:
                continue
            # A block's probabilities change hands beside the ring, at most two bytes each.
            keys = key_block(dim)
            ring = schedule.ring * keys * dim * 2 + 16 * keys * 2
            held = max(ring, shared_bytes(stored, padded(dim) // slices, schedule.resident)) + 16
            assert resident * (held + RESERVED) <= SHARED


FORMS = [(7, Cut(7, 7)), (7, Cut(0, 21)), (7, Cut(0, 17)), (7, Cut(0, 7)), (7, Cut(4, 11))]
FORMS += [(7, Cut(4, 13)), (7, Cut(6, 19)), (1, Cut(0, 5)), (330, Cut(264, 528)), (56, Cut(0, 132))]


def chosen(tiles, blocks, stored=1, dim=128, exact=True):
    """The cut for sequences of so many key blocks."""
    keys = blocks * key_block(dim)
    layout = SimpleNamespace(exact=exact, longest_context=keys, mean_context=keys)
    return decode_cut(layout, tiles, stored, dim, MULTIPROCESSORS, read_once=False)


@pytest.mark.parametrize("tiles, cut", FORMS, ids=str)
def test_the_kernel_gives_every_tile_all_of_its_programs_once(tiles, cut, monkeypatch):
    """Its own lines run, with numbers in place of tensors."""
    cut.check(tiles)
    met = {}
    for program in range(cut.programs):
        device = SimpleNamespace(
            program_id=lambda axis, program=program: program,
            num_programs=lambda axis: cut.programs,
            where=lambda condition, yes, no: yes if condition else no,
        )
        monkeypatch.setattr(decode, "gl", device)
        forms = cut.whole > 0, cut.whole < tiles
        tile, part, parts = decode.place_of.fn(cut.whole, tiles - cut.whole, *forms)
        met.setdefault(tile, []).append((part, parts))
        if program < cut.whole:
            assert (tile, part, parts) == (program, 0, 1)
    assert sorted(met) == list(range(tiles))
    counts = [len(met[tile]) for tile in range(tiles)]
    for places in met.values():
        assert sorted(places) == [(part, len(places)) for part in range(len(places))]
    divided = counts[cut.whole :]
    assert divided == sorted(divided, reverse=True) and max(divided, default=0) <= 1 + min(
        divided, default=0
    )


def test_a_cut_that_leaves_a_tile_out_is_refused():
    for cut in (Cut(8, 9), Cut(0, 6), Cut(7, 8), Cut(-1, 9)):
        with pytest.raises(ValueError, match="attention: Cut"):
            cut.check(7)


def test_every_cut_of_the_rule_is_one():
    draw = random.Random(0)
    for _ in range(3000):
        tiles, blocks = int(2 ** draw.uniform(0, 14)), int(2 ** draw.uniform(0, 9))
        sizes = draw.choice([1, 4, 16]), draw.choice([64, 128, 256]), draw.random() < 0.5
        cut = chosen(tiles, blocks, *sizes)
        cut.check(tiles)
        assert cut.programs - cut.whole <= (tiles - cut.whole) * blocks


@pytest.mark.parametrize(
    "tiles, blocks, stored, dim, cut",
    [
        (330, 149, 1, 128, Cut(264, 528)),
        (576, 6, 2, 128, Cut(528, 792)),
        (850, 10, 1, 128, Cut(792, 1056)),
        (920, 64, 2, 64, Cut(792, 1188)),
        (56, 140, 1, 128, Cut(0, 528)),
        (152, 47, 2, 128, Cut(0, 528)),
        (152, 43, 2, 64, Cut(0, 792)),
        (207, 32, 1, 128, Cut(0, 528)),
        (48, 24, 8, 64, Cut(0, 396)),
        (48, 24, 8, 128, Cut(0, 264)),
        (20, 225, 8, 256, Cut(0, 264)),
        (200, 12, 8, 64, Cut(200, 200)),
        (200, 12, 8, 128, Cut(200, 200)),
        (121, 8, 8, 128, Cut(121, 121)),
    ],
)
def test_the_rule_takes_what_was_fastest_or_nearly_so_on_an_h100(tiles, blocks, stored, dim, cut):
    """docs/log.md has the times."""
    assert chosen(tiles, blocks, stored, dim) == cut


def test_tiles_whose_lengths_are_bounds_are_divided_only_where_the_device_would_be_idle():
    for tiles, cut in ((152, Cut.even(152, 1)), (56, Cut(0, 264)), (330, Cut(264, 528))):
        assert chosen(tiles, 256, exact=False) == cut
