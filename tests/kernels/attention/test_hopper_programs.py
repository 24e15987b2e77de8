"""Which tiles each program of the forward and the backward pass of sm_90 has, and where a
chain of dq lies in memory. The programs are walked in test_attention_backward_chains."""

from itertools import pairwise

import pytest
import torch

from rl_consistency.kernels.attention.hopper.backward import (
    QUERIES,
    ROW,
    backward_programs,
    chain_layout,
    empty_chains,
)
from rl_consistency.kernels.attention.hopper.forward import ROUND, blocks_read, dealt_tiles
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import chain_bytes
from tests.kernels.attention.layouts import packed

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
    entries = dealt_tiles(packed(lens), CPU, group, kv_heads, 128, None, MULTIPROCESSORS).tolist()
    load = torch.zeros(MULTIPROCESSORS)
    for i, entry in enumerate(entries):
        load[i % MULTIPROCESSORS] += cost(entry, lens, group)
    assert load.mean() / load.max() > 0.96


@pytest.mark.parametrize("programs", [1, 2, 7, 132, 10_000])
def test_every_tile_of_every_head_is_dealt_once_whatever_the_programs(programs):
    lens, group, kv_heads = [300, 0, 1, 129, 700, 128], 3, 2
    entries = dealt_tiles(packed(lens), CPU, group, kv_heads, 128, None, programs)
    assert entries.dtype == torch.int32 and entries.is_contiguous()
    assert sorted(entries.tolist()) == [
        [i, row, head] for i, n in enumerate(lens) for row in range(0, n * group, 128)
        for head in range(kv_heads)
    ]  # fmt: skip


def test_programs_that_run_at_one_time_have_tiles_of_few_heads():
    lens, kv_heads = [512] * 32, 8
    entries = dealt_tiles(packed(lens), CPU, 7, kv_heads, 128, None, MULTIPROCESSORS)
    for begin in range(0, len(entries), MULTIPROCESSORS):
        heads = entries[begin : begin + MULTIPROCESSORS, 2].unique()
        assert len(heads) <= 2 and heads.max() - heads.min() <= 1


@pytest.mark.parametrize(("keys", "window"), [(128, None), (64, None), (128, 200), (64, 1)])
def test_blocks_are_those_that_the_rows_of_a_tile_see(keys, window):
    lens, group = [700, 129, 64], 6
    tiles = packed(lens).tiles(CPU, group, 128)
    blocks = blocks_read(packed(lens), tiles, group, keys, window).double() + ROUND
    assert blocks.tolist() == [cost([*t, 0], lens, group, keys, window) for t in tiles.tolist()]


def test_sums_of_dq_take_no_memory_where_one_tile_of_keys_holds_every_sequence():
    assert chain_bytes(PackedSequences.of([0, 128], [128, 1]), 4, 64) == 0
    assert chain_bytes(PackedSequences.of([0, 144], [129, 1]), 4, 64) == 4 * (3 + 1) * 64 * 4 * 64
    assert chain_bytes(PackedSequences.of([], []), 4, 64) == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lens", [[1], [129, 0, 1], [128, 64]])
def test_boxes_of_the_chains_are_a_tile_and_all_tiles_fit(dim, lens):
    layout = packed(lens)
    chains, descriptor = empty_chains(layout, 2, dim, CPU)
    assert len(chains) % (QUERIES.value * dim // ROW.value) == 0 and chains.is_contiguous()
    assert descriptor.block_shape == [QUERIES.value * dim // ROW.value, ROW.value]
    assert descriptor.shape == list(chains.shape)
    assert chains.numel() * 4 == (chain_bytes(layout, 2, dim) or 4 * QUERIES.value * dim)


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_shared_memory_holds_a_chain_as_threads_do(dim):
    """Neighbouring lanes hold 16 bytes each, side by side: no two of a warp in one bank."""
    bases = chain_layout.fn(dim).offset_bases
    assert 1 << len(bases) == QUERIES.value * dim
    for offset in range(QUERIES.value * dim):
        chosen = [basis for i, basis in enumerate(bases) if offset >> i & 1]
        row, column = (sum(basis[axis] for basis in chosen) for axis in (0, 1))
        # Where the matrix units hold it: eight warps, four along rows and two along columns.
        warp = column // (dim // 2) * 4 + row // 16
        lane = row % 8 * 4 + column % 8 // 2
        group = column % (dim // 2) // 8
        within = row // 8 % 2 * 2 + column % 2
        assert offset == warp * (8 * dim) + group * 128 + lane * 4 + within


def listed(layout, kv_heads, group, multiprocessors=MULTIPROCESSORS, heads=None):
    found = backward_programs(layout, CPU, kv_heads, group, multiprocessors, None, heads)
    return found.entries.tolist()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
def test_programs_for_the_same_head_come_upward_and_every_tile_has_all_heads(heads):
    generator = torch.Generator().manual_seed(0)
    firsts = {1: [0, 1, 2, 3, 4], 2: [0, 1, 3], 3: [0, 2], 4: [0, 2], 5: [0]}[heads]
    for trial in range(30):
        lens = [*torch.randint(0, 1000, (7,), generator=generator).tolist(), 0, 1, 128, 129]
        programs = listed(packed(lens), 3, 5, (1, 33, 132, 2000)[trial % 4], heads)
        assert len(programs) == sum(-(-n // 128) for n in lens) * 3 * len(firsts)
        for i, length in enumerate(lens):
            for kv_head in range(3):
                for first, end in pairwise([*firsts, 5]):
                    own = [p for p in programs if p[0] == i and p[2:4] == [kv_head, first]]
                    assert [p[1] for p in own] == list(range(0, length, 128))
                    assert all(p[4] == end - first <= heads for p in own)
        found = backward_programs(packed(lens), CPU, 3, 5, 132, None, heads)
        assert found.places == (max(p[5] for p in programs) + 1 if len(firsts) > 1 else 0)
        places: dict[int, list[tuple[int, ...]]] = {}
        for sequence, first, kv_head, head, own, place in programs:
            # What `handed` counts: programs for earlier heads.
            assert -(-head // own) == firsts.index(head)
            places.setdefault(place, []).append((sequence, first, kv_head, head))
        for found in places.values():
            assert len({one[:3] for one in found}) == 1
            assert [one[3] for one in found] == firsts


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "most"),
    [
        ([1024] * 16, 14, 2, 4),
        ([2048] * 8, 12, 2, 3),
        ([4096] * 4, 12, 2, 2),
        ([16384], 12, 2, 2),
        ([1500] * 11, 16, 2, 4),
        ([3443] * 4, 12, 3, 2),
        ([1024] * 16, 12, 2, 6),
        ([2048] * 8, 24, 8, 3),
        ([129, 7] * 40, 6, 2, 3),
        ([4096] * 2, 16, 2, 8),
        ([32768], 12, 2, 6),
    ],
)
def test_programs_take_few_heads_only_where_few_of_them_share_the_device(
    lens, heads, kv_heads, most
):
    group = heads // kv_heads
    found = backward_programs(packed(lens), CPU, kv_heads, group, MULTIPROCESSORS, None)
    assert max(found.entries[:, 4].tolist()) == most
    places = sum(-(-n // 128) for n in lens) * kv_heads
    assert found.places == (0 if most == group else places)


def test_a_head_alone_and_a_window_hand_nothing_over():
    layout = packed([16384])
    for group, window, places in ((1, None, 0), (6, 4096, 0), (6, None, 256), (6, 16384, 256)):
        found = backward_programs(layout, CPU, 2, group, MULTIPROCESSORS, window)
        assert found.places == places


def test_the_longest_tiles_of_programs_for_all_heads_start_first():
    layout = packed([300, 900, 129])
    firsts = [p[:3] for p in listed(layout, 2, 4, 1, 4)]
    tiles = layout.key_tiles(CPU, 128).tolist()
    assert firsts == [[*tile, head] for tile in tiles for head in range(2)]


def test_a_layout_keeps_the_programs_of_each_question():
    layout = packed([512, 300])
    for asked in ((2, 4, 132, None), (2, 4, 6, 9), (1, 4, 132, None), (2, 4, 132, None, 3)):
        found = backward_programs(layout, CPU, *asked)
        assert backward_programs(layout, CPU, *asked) is found
        again = backward_programs(packed([512, 300]), CPU, *asked)
        assert torch.equal(found.entries, again.entries) and found.places == again.places


def test_a_layout_without_queries_has_no_programs():
    for lens in ([], [0, 0]):
        assert listed(packed(lens), 2, 4) == []
