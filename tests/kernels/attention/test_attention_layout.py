import pytest
import torch

from rl_consistency.kernels.attention.layout import (
    KEY_BLOCK,
    ROW_TILE,
    AttentionLayout,
    PackedSequences,
    PagedAttention,
)
from rl_consistency.kernels.attention.op import _check


def paged(**changes):
    given = {
        "query_starts": [0, 3],
        "query_lens": [3, 1],
        "context_lens": [5, 4],
        "block_tables": [[2, 0], [3]],
        "slot_mapping": torch.tensor([10, 11, 0, 15]),
        "key_cache": [torch.zeros(4, 4, 1, 16)],
        "value_cache": [torch.zeros(4, 4, 1, 16)],
        "block_size": 4,
    }
    return PagedAttention(**(given | changes))


def owners(layout, group):
    """(sequence, query row, position) of every row of the plan's tiles that is not filler."""
    plan = layout.plan(group, None)
    return [
        (int(s), int(r), int(p))
        for s, rows, positions in zip(
            plan.sequence, plan.query_rows, plan.query_positions, strict=True
        )
        for r, p in zip(rows, positions, strict=True)
        if p >= 0
    ]


@pytest.mark.parametrize("group", [1, 2, 3, 16, 20])
def test_every_query_and_head_stands_in_exactly_one_tile_row(group):
    layout = PackedSequences.of([0, 32, 48], [20, 1, 70])
    expected = [
        (i, (start + t) * group + head, t)
        for i, (start, n) in enumerate([(0, 20), (32, 1), (48, 70)])
        for t in range(n)
        for head in range(group)
    ]
    assert owners(layout, group) == expected
    assert layout.plan(group, None).query_rows.shape[1] == ROW_TILE


def test_a_plan_is_made_once_per_group_and_window():
    layout = PackedSequences.of([0], [20])
    assert layout.plan(2, None) is layout.plan(2, None)
    assert layout.plan(2, None) is not layout.plan(2, 7)


def test_positions_of_new_queries_count_from_the_sequence_start():
    assert owners(paged(), 1) == [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 3, 3)]


def test_blocks_outside_the_window_are_left_out():
    layout = PackedSequences.of([0], [300])
    full, windowed = layout.plan(1, None), layout.plan(1, 10)
    tile = 200 // ROW_TILE
    assert full.first_block[tile] == 0
    assert windowed.first_block[tile] == (tile * ROW_TILE - 9) // KEY_BLOCK
    assert (windowed.last_block == full.last_block).all()
    assert full.last_block[tile] == (tile * ROW_TILE + ROW_TILE - 1) // KEY_BLOCK


def test_packed_keys_stand_in_the_rows_of_their_queries():
    rows = PackedSequences.of([0, 16], [2, 3]).key_rows(5)
    assert rows.tolist() == [[0, 1, 1, 1, 1], [16, 17, 18, 18, 18]]


def test_paged_keys_stand_where_the_block_table_says():
    rows = paged().key_rows(6)
    assert rows.tolist() == [[8, 9, 10, 11, 0, 0], [12, 13, 14, 15, 15, 15]]


def test_new_keys_are_written_to_their_slots():
    call = paged()
    k = torch.arange(1.0, 5.0)[:, None, None].expand(4, 1, 16)
    call.write(0, k, -k)
    keys = call.key_cache[0].view(16, 16)[:, 0]
    assert keys[[10, 11, 0, 15]].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int((keys != 0).sum()) == 4
    assert torch.equal(call.value_cache[0], -call.key_cache[0])


def test_an_empty_layout_has_no_tiles():
    assert len(PackedSequences.of([], []).plan(2, None).sequence) == 0
    assert len(PackedSequences.of([0], [0]).plan(2, None).sequence) == 0


def test_a_layout_must_say_where_its_keys_are():
    with pytest.raises(NotImplementedError):
        AttentionLayout(query_starts=[0], query_lens=[1], context_lens=[1]).key_rows(1)


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match="1 starts, 2 query lengths and 2 context lengths"):
        PackedSequences.of([0], [1, 2])
    with pytest.raises(ValueError, match="sequence 0 has -1 queries"):
        PackedSequences.of([0], [-1])
    for contexts in ([5, 3], [3, 2]):
        with pytest.raises(ValueError, match=r"one key per query; .* PagedAttention layout"):
            PackedSequences(query_starts=[0, 16], query_lens=[2, 2], context_lens=contexts)
    with pytest.raises(ValueError, match="sequence 1 has 5 queries and 4 keys"):
        paged(query_lens=[3, 5])
    with pytest.raises(ValueError, match="sequence 0 has 5 tokens but its 1 blocks hold 4"):
        paged(block_tables=[[2], [3]])


def test_key_rows_are_copied_to_a_device_once():
    layout = paged()
    rows = layout.key_rows_on(torch.device("cpu"))
    assert rows.tolist() == [[8, 9, 10, 11, 0], [12, 13, 14, 15, 15]]
    assert layout.key_rows_on(torch.device("cpu")) is rows


def test_tiles_of_sequences_whose_keys_fit_the_cache_are_neighbours_and_the_longest_is_first():
    lens = [300, 9000, 9000, 129, 300]
    layout = PackedSequences.of([0, 300, 9300, 18300, 18429], lens)
    tiles = layout.tiles(torch.device("cpu"), 2, 128).tolist()
    every = [[i, row] for i, n in enumerate(lens) for row in range(0, 2 * n, 128)]
    assert sorted(tiles) == every
    # The second sequence of 9,000 begins within the first 16,384 keys; all others come after it.
    assert {i for i, _ in tiles[:282]} == {1, 2} and tiles[:2] == [[1, 17920], [2, 17920]]
    for near in (tiles[:282], tiles[282:]):
        assert [row for _, row in near] == sorted((row for _, row in near), reverse=True)


def test_key_tiles_that_most_queries_see_come_first():
    tiles = PackedSequences.of([0, 300, 300], [300, 0, 129]).key_tiles(torch.device("cpu"), 128)
    assert tiles.tolist() == [[0, 0], [0, 128], [2, 0], [0, 256], [2, 128]]


def test_sequences_whose_keys_are_all_new_are_told_from_those_with_a_past():
    layout = paged(context_lens=[3, 4])
    packed, rest = layout.by_past()
    assert isinstance(packed, PackedSequences)
    assert (list(packed.query_starts), list(packed.query_lens)) == ([0], [3])
    assert isinstance(rest, PagedAttention)
    assert (list(rest.query_starts), list(rest.query_lens)) == ([3], [1])
    assert (list(rest.context_lens), list(rest.block_tables)) == ([4], [[3]])
    assert rest.slot_mapping is layout.slot_mapping
    assert layout.by_past() is layout.by_past()


def test_calls_of_one_kind_of_sequences_are_not_split():
    layout = paged()
    assert layout.by_past() == (None, layout)
    packed, rest = paged(context_lens=[3, 1]).by_past()
    assert rest is None and packed is not None and list(packed.query_starts) == [0, 3]


def test_a_layout_knows_its_rows_and_its_longest_sequences():
    layout = PackedSequences.of([0, 40, 10], [7, 5, 20])
    assert (layout.num_rows, layout.most_queries, layout.longest_context) == (45, 20, 20)
    empty = PackedSequences.of([], [])
    assert (empty.num_rows, empty.most_queries, empty.longest_context) == (0, 0, 0)


def test_a_compiler_traces_the_checks_of_a_call():
    def checked(q):
        _check(q, q, q, PackedSequences.of([0], [32]), 0.1, None)
        return q + 1

    q = torch.zeros(32, 4, 16)
    assert torch.equal(torch.compile(checked, backend="eager", fullgraph=True)(q), q + 1)


def test_what_a_layout_keeps_is_made_once():
    layout, made = PackedSequences.of([0], [3]), []
    for _ in range(2):
        assert layout.kept(("own", 1), lambda: made.append(1) or "made") == "made"
    assert made == [1]
    assert layout.kept(("own", 2), lambda: "other") == "other"
    assert PackedSequences.of([0], [3]).kept(("own", 1), lambda: "other") == "other"
