"""Which programs the backward pass of sm_90 has, and their order; they are walked in
test_attention_backward_chains."""

from itertools import pairwise

import pytest
import torch

from rl_consistency.kernels.attention.hopper.backward import backward_programs
from rl_consistency.kernels.attention.layout import PackedSequences

CPU = torch.device("cpu")
MULTIPROCESSORS = 132


def packed(lens):
    return PackedSequences.of([sum(lens[:i]) for i in range(len(lens))], lens)


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
        ([4096] * 5, 16, 2, 3),
        ([4096] * 4, 12, 2, 2),
        ([16384], 12, 2, 2),
        ([1500] * 11, 16, 2, 4),
        ([3443] * 4, 12, 3, 2),
    ],
)
def test_programs_take_few_heads_where_few_of_them_share_the_device(lens, heads, kv_heads, most):
    found = backward_programs(packed(lens), CPU, kv_heads, heads // kv_heads, MULTIPROCESSORS, None)
    assert max(found.entries[:, 4].tolist()) == most
    assert found.places == sum(-(-n // 128) for n in lens) * kv_heads


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads"),
    [
        ([1024] * 16, 12, 2),
        ([1024] * 16, 28, 4),
        ([2048] * 8, 24, 8),
        ([512] * 32, 56, 8),
        ([129, 7] * 40, 6, 2),
        ([4096] * 2, 16, 2),
        ([2048] * 8, 6, 3),
        ([32768], 12, 2),
    ],
)
def test_programs_take_all_heads_where_many_tiles_share_the_device(lens, heads, kv_heads):
    group = heads // kv_heads
    found = backward_programs(packed(lens), CPU, kv_heads, group, MULTIPROCESSORS, None)
    assert set(found.entries[:, 4].tolist()) == {group} and found.places == 0


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
