"""Layouts of sequences: packed, in a paged cache, sharing keys, and with numbers on the device."""

from dataclasses import fields

import pytest
import torch

from rl_consistency.kernels.attention.layout import (
    KEY_BLOCK,
    ROW_TILE,
    CapturedPagedAttention,
    PackedSequences,
    PagedAttention,
    SequenceTables,
    SharedRun,
    SharedTables,
    shared_arrays,
)
from rl_consistency.kernels.attention.op import _check
from rl_consistency.kernels.attention.paged_cache_triton import write_cache
from rl_consistency.kernels.attention.schedules import (
    SHARED,
    SHARED_DEEP,
    SHARED_HIGH,
    SHARED_LOW,
    SPLIT_ROWS,
    pick_shared,
)
from tests.kernels.attention import layouts

CPU = torch.device("cpu")


def paged(context_lens=(5, 4), **changes):
    """3 and 1 new queries in a cache of four blocks."""
    given = {
        "query_starts": [0, 3],
        "query_lens": [3, 1],
        "block_tables": [[2, 0], [3]],
        "slot_mapping": torch.tensor([10, 11, 0, 15]),
        **{name: [torch.zeros(4, 4, 1, 16)] for name in ("key_cache", "value_cache")},
    }
    return layouts.paged(context_lens, block_size=4, **(given | changes))


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


def test_keys_stand_in_the_rows_of_their_queries_or_where_the_block_table_says():
    rows = PackedSequences.of([0, 16], [2, 3]).key_rows(5)
    assert rows.tolist() == [[0, 1, 1, 1, 1], [16, 17, 18, 18, 18]]
    assert paged().key_rows(6).tolist() == [[8, 9, 10, 11, 0, 0], [12, 13, 14, 15, 15, 15]]


def test_new_keys_are_written_to_their_slots():
    call = paged()
    k = torch.arange(1.0, 5.0)[:, None, None].expand(4, 1, 16)
    write_cache(call, 0, k, -k)
    keys = call.key_cache[0].view(16, 16)[:, 0]
    assert keys[[10, 11, 0, 15]].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int((keys != 0).sum()) == 4
    assert torch.equal(call.value_cache[0], -call.key_cache[0])


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


def test_tiles_of_sequences_whose_keys_fit_the_cache_are_neighbours_and_the_longest_is_first():
    lens = [300, 9000, 9000, 129, 300]
    layout = PackedSequences.of([0, 300, 9300, 18300, 18429], lens)
    tiles = layout.tiles(CPU, 2, 128).tolist()
    every = [[i, row] for i, n in enumerate(lens) for row in range(0, 2 * n, 128)]
    assert sorted(tiles) == every
    # The second sequence of 9,000 begins within the first 16,384 keys; all others come after it.
    assert {i for i, _ in tiles[:282]} == {1, 2} and tiles[:2] == [[1, 17920], [2, 17920]]
    for near in (tiles[:282], tiles[282:]):
        assert [row for _, row in near] == sorted((row for _, row in near), reverse=True)


def test_key_tiles_that_most_queries_see_come_first():
    tiles = PackedSequences.of([0, 300, 300], [300, 0, 129]).key_tiles(CPU, 128)
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

    layout = paged()
    assert layout.by_past() == (None, layout)
    packed, rest = paged(context_lens=[3, 1]).by_past()
    assert rest is None and packed is not None and list(packed.query_starts) == [0, 3]


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


SHARED_TABLES = [[2, 0, 3], [2, 0, 4], [2, 0, 5], [7, 0, 6]]


def sharing(*runs, **changes):
    """1, 2, 1 and 1 new queries; the first three sequences have two blocks in common."""
    given = {
        "query_starts": [0, 1, 3, 4],
        "query_lens": [1, 2, 1, 1],
        "block_tables": SHARED_TABLES,
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
    }
    return layouts.paged([10, 12, 9, 9], block_size=4, shared_runs=runs, **(given | changes))


def test_a_layout_tells_the_device_which_sequences_share_keys():
    layout = sharing(SharedRun(0, 3, 8))
    shared = layout.tables(CPU).shared
    assert shared is not None
    assert shared.runs.tolist() == [[0, 3, 8]] and shared.keys.tolist() == [8, 8, 8, 0]
    assert shared.runs.dtype == shared.keys.dtype == torch.int32
    assert layout.most_shared_queries() == 4
    assert sharing().tables(CPU).shared is PackedSequences.of([0], [3]).tables(CPU).shared is None


def test_part_of_a_cache_block_may_be_shared():
    sharing(SharedRun(0, 2, 7))
    sharing(SharedRun(0, 2, 5), block_tables=[[2, 0, 3]] * 2 + [[1, 1, 1]] * 2)


@pytest.mark.parametrize(
    "runs, match",
    [
        (((0, 2, 4), (1, 2, 4)), "is in another run too"),
        (((0, 3, 9),), "has 8 keys before its queries"),
        (((0, 2, 9),), "first 3 blocks of its sequences are not the same"),
        (((2, 2, 4),), "first 1 blocks of its sequences are not the same"),
        (((0, 2, 0),), "there is at least one"),
        (((0, 1, 4),), "a run has 2 to 8 of them"),
        (((0, 9, 4),), "a run has 2 to 8 of them"),
        (((3, 2, 4),), "in a call of 4 sequences"),
        (((-1, 2, 4),), "in a call of 4 sequences"),
    ],
)
def test_runs_that_do_not_hold_are_refused(runs, match):
    with pytest.raises(ValueError, match=match):
        sharing(*(SharedRun(*run) for run in runs))


def test_queries_that_stand_out_of_order_are_refused():
    with pytest.raises(ValueError, match="the queries stand in their order"):
        sharing(SharedRun(0, 2, 8), query_starts=[3, 0, 2, 4])
    sharing(query_starts=[3, 0, 2, 4])


@pytest.mark.parametrize(
    "rows, runs, likely, kv_heads, most_blocks, schedule, programs",
    [
        # A tile holds a run, or two tiles do.
        (16, 64, 32, 8, 320, SHARED_LOW, 1),
        (17, 64, 32, 8, 320, SHARED_HIGH, 1),
        (64, 64, 32, 8, 320, SHARED_HIGH, 1),
        # High tiles with a multiprocessor each keep more in flight.
        (48, 64, 32, 2, 17, SHARED_DEEP, 1),
        (32, 64, 32, 8, 17, SHARED_HIGH, 1),
        # Programs share the keys of few runs in low tiles.
        (16, 8, 4, 8, 320, SHARED_LOW, 4),
        (16, 2, 1, 8, 320, SHARED_LOW, 16),
        (32, 2, 1, 8, 320, SHARED_LOW, 8),
        (16, 2, 1, 8, 3, SHARED_LOW, 3),
        # They do not where their blocks would take too much memory: 364 MB.
        (32, 8, 4, 8, 230, SHARED_LOW, 2),
        (32, 8, 4, 8, 320, SHARED_DEEP, 1),
    ],
)
def test_tiles_of_runs_and_programs_that_share_their_keys(
    rows, runs, likely, kv_heads, most_blocks, schedule, programs
):
    plan = pick_shared(
        rows, runs=runs, likely=likely, kv_heads=kv_heads, most_blocks=most_blocks, dim=128,
        places=132,
    )  # fmt: skip
    assert (plan.schedule, plan.programs) == (schedule, programs)
    assert SHARED_LOW.rows <= SPLIT_ROWS and all(s.ring % 2 == 1 for s in SHARED)


def captured(query_len, context_len, tables, shared=None, queries=2, capacity=12):
    starts = range(0, queries * len(query_len), queries)
    numbers = [list(starts), query_len, context_len, tables]
    return CapturedPagedAttention.of(
        SequenceTables(*(torch.tensor(x, dtype=torch.int32) for x in numbers), shared),
        queries=queries,
        capacity=capacity,
        slot_mapping=torch.zeros(queries * len(query_len), dtype=torch.int64),
        key_cache=[],
        value_cache=[],
        block_size=4,
    )


def test_a_captured_layout_holds_the_device_to_the_same_promises():
    runs, keys = shared_arrays([SharedRun(1, 2, 8)], 2, 3)
    assert runs == [[1, 2, 8], [0, 0, 0]] and keys == [0, 8, 8]
    shared = SharedTables(*(torch.tensor(x, dtype=torch.int32) for x in (runs, keys)))
    layout = captured([1, 2, 1], [12, 11, 9], [SHARED_TABLES[3], *SHARED_TABLES[:2]], shared)
    assert layout.tables(CPU).shared is shared and layout.most_shared_queries() == 6
    assert layout.in_force().shared_runs == [SharedRun(1, 2, 8)]
    shared.runs[0, 0] = 0
    with pytest.raises(ValueError, match="not the same ones"):
        layout.in_force()


def test_a_captured_layout_is_read_when_it_is_used():
    tables = [[2, 0, 3], [3, 1, 2]]
    layout = captured([1, 2], [5, 9], tables)
    own = {"query_starts": [0, 2], "query_lens": [1, 2], "block_tables": tables, "block_size": 4}
    for contexts in ([5, 9], [7, 9]):
        layout.numbers.context_len[0] = contexts[0]
        expected, found = layouts.paged(contexts, **own).plan(2, None), layout.plan(2, None)
        assert found.query_positions[0, 0] == contexts[0] - 1
        for part in fields(expected):
            assert torch.equal(getattr(found, part.name), getattr(expected, part.name))
    assert layout.tables(CPU) is layout.numbers


def test_a_captured_layout_tells_the_host_upper_bounds():
    layout = captured([1, 2], [5, 9], [[2, 0, 3], [3, 1, 2]])
    assert list(layout.query_starts) == [0, 2]
    assert layout.query_lens == [2, 2] and layout.context_lens == [12, 12]
    tiles = layout.tiles(CPU, 3, 4)
    assert sorted(tiles.tolist()) == [[0, 0], [0, 4], [1, 0], [1, 4]]
    assert layout.tiles(CPU, 3, 4) is tiles
    assert layout.by_past() == (None, layout), "only the device knows who has a past"
    # No sequence has more queries than the cache holds.
    layout = captured([1, 2], [5, 3], [[2, 0, 3]] * 2, queries=8, capacity=6)
    assert layout.query_lens == [6, 6] and list(layout.query_starts) == [0, 8]


def test_rows_behind_a_sequences_queries_are_owned_by_nobody():
    assert captured([1, 1], [5, 9], [[2, 0, 3]] * 2, queries=1).owns(2)
    assert not captured([2, 2], [5, 9], [[2, 0, 3]] * 2).owns(4)


def test_a_captured_layout_whose_tables_are_too_narrow_is_refused():
    with pytest.raises(ValueError, match="contexts of up to 13 tokens but .* hold 12"):
        captured([1, 1], [5, 9], [[2, 0, 3]] * 2, capacity=13)
