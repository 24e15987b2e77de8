"""Which tiles each program of the forward pass of sm_90 has."""

import pytest
import torch

from rl_consistency.kernels.attention.hopper.forward import ROUND, Deal
from rl_consistency.kernels.attention.layout import PackedSequences

CPU = torch.device("cpu")
MULTIPROCESSORS = 132
SHAPES = [
    ([1024] * 16, 14, 2),
    ([2048] * 8, 6, 3),
    ([512] * 32, 56, 8),
    ([393] * 41, 28, 7),
    ([100 * i + 37 for i in range(1, 17)], 32, 8),
    ([100 * i + 37 for i in range(1, 34)], 12, 2),
]


def packed(lens):
    return PackedSequences.of([sum(lens[:i]) for i in range(len(lens))], lens)


def cost(entry, lens, group, keys=128, window=None):
    """A tile's blocks of keys, counted one by one, and what comes beside them."""
    sequence, first_row, _head = entry
    queries = range(first_row // group, min((first_row + 127) // group + 1, lens[sequence]))
    seen = {
        key // keys
        for query in (queries[0], queries[-1])
        for key in (0 if window is None else max(query - window + 1, 0), query)
    }
    return max(seen) - min(seen) + 1 + ROUND


@pytest.mark.parametrize(("lens", "heads", "kv_heads"), SHAPES)
def test_programs_have_about_equally_much_to_do(lens, heads, kv_heads):
    group = heads // kv_heads
    deal = Deal(packed(lens), group, kv_heads, 128, None, MULTIPROCESSORS)
    entries = deal.on(CPU).tolist()
    load = torch.zeros(MULTIPROCESSORS)
    for i, entry in enumerate(entries):
        load[i % MULTIPROCESSORS] += cost(entry, lens, group)
    assert load.mean() / load.max() > 0.96


@pytest.mark.parametrize("programs", [1, 2, 7, 132, 10_000])
def test_every_tile_of_every_head_is_dealt_once_whatever_the_programs(programs):
    lens, group, kv_heads = [300, 0, 1, 129, 700, 128], 3, 2
    entries = Deal(packed(lens), group, kv_heads, 128, None, programs).on(CPU)
    assert entries.dtype == torch.int32 and entries.is_contiguous()
    assert sorted(entries.tolist()) == [
        [i, row, head] for i, n in enumerate(lens) for row in range(0, n * group, 128)
        for head in range(kv_heads)
    ]  # fmt: skip


def test_programs_that_run_at_one_time_have_tiles_of_few_heads():
    lens, kv_heads = [512] * 32, 8
    entries = Deal(packed(lens), 7, kv_heads, 128, None, MULTIPROCESSORS).on(CPU)
    for begin in range(0, len(entries), MULTIPROCESSORS):
        heads = entries[begin : begin + MULTIPROCESSORS, 2].unique()
        assert len(heads) <= 2 and heads.max() - heads.min() <= 1


def test_one_program_for_each_tile_has_the_longest_first():
    lens, group = [300, 900], 4
    entries = Deal(packed(lens), group, 2, 128, None, 1000).on(CPU).tolist()
    for head in range(2):
        blocks = [cost(entry, lens, group) for entry in entries if entry[2] == head]
        assert blocks == sorted(blocks, reverse=True)


@pytest.mark.parametrize(("keys", "window"), [(128, None), (64, None), (128, 200), (64, 1)])
def test_blocks_are_those_that_the_rows_of_a_tile_see(keys, window):
    lens, group = [700, 129, 64], 6
    deal = Deal(packed(lens), group, 1, keys, window, MULTIPROCESSORS)
    tiles = deal.layout.tiles(CPU, group, 128)
    blocks = deal._blocks(tiles).double() + ROUND
    assert blocks.tolist() == [cost([*t, 0], lens, group, keys, window) for t in tiles.tolist()]


def test_a_layout_keeps_its_deals():
    layout = packed([300, 128])
    first = Deal(layout, 2, 2, 128, None, 3)
    assert first.on(CPU) is Deal(layout, 2, 2, 128, None, 3).on(CPU)
    assert first.on(CPU) is not Deal(layout, 2, 2, 128, None, 4).on(CPU)
