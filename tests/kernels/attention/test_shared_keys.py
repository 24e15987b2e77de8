"""What a layout accepts as shared keys, and what it tells the device of them."""

import pytest
import torch

from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PackedSequences,
    PagedAttention,
    SequenceTables,
    SharedRun,
    SharedTables,
    shared_arrays,
)
from rl_consistency.kernels.attention.schedules import (
    SHARED,
    SHARED_DEEP,
    SHARED_HIGH,
    SHARED_LOW,
    SPLIT_ROWS,
    pick_shared,
)

CPU = torch.device("cpu")
CACHE = [torch.zeros(9, 4, 1, 16)]
TABLES = [[2, 0, 3], [2, 0, 4], [2, 0, 5], [7, 0, 6]]


def paged(*runs, **changes):
    given = {
        "query_starts": [0, 1, 3, 4],
        "query_lens": [1, 2, 1, 1],
        "context_lens": [10, 12, 9, 9],
        "block_tables": TABLES,
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
        "key_cache": CACHE,
        "value_cache": CACHE,
        "block_size": 4,
        "shared_runs": runs,
    }
    return PagedAttention(**(given | changes))


def test_a_layout_tells_the_device_which_sequences_share_keys():
    layout = paged(SharedRun(0, 3, 8))
    shared = layout.tables(CPU).shared
    assert shared is not None
    assert shared.runs.tolist() == [[0, 3, 8]] and shared.keys.tolist() == [8, 8, 8, 0]
    assert shared.runs.dtype == shared.keys.dtype == torch.int32
    assert layout.most_shared_queries() == 4
    assert paged().tables(CPU).shared is PackedSequences.of([0], [3]).tables(CPU).shared is None


def test_part_of_a_cache_block_may_be_shared():
    paged(SharedRun(0, 2, 7))
    paged(SharedRun(0, 2, 5), block_tables=[[2, 0, 3]] * 2 + [[1, 1, 1]] * 2)


@pytest.mark.parametrize(
    "run, match",
    [
        (SharedRun(0, 3, 9), "has 8 keys before its queries"),
        (SharedRun(0, 2, 9), "first 3 blocks of its sequences are not the same"),
        (SharedRun(2, 2, 4), "first 1 blocks of its sequences are not the same"),
        (SharedRun(0, 2, 0), "there is at least one"),
        (SharedRun(0, 1, 4), "a run has 2 to 8 of them"),
        (SharedRun(0, 9, 4), "a run has 2 to 8 of them"),
        (SharedRun(3, 2, 4), "in a call of 4 sequences"),
        (SharedRun(-1, 2, 4), "in a call of 4 sequences"),
    ],
)
def test_a_run_that_does_not_hold_is_refused(run, match):
    with pytest.raises(ValueError, match=match):
        paged(run)


def test_a_sequence_is_in_one_run_only():
    with pytest.raises(ValueError, match="is in another run too"):
        paged(SharedRun(0, 2, 4), SharedRun(1, 2, 4))


def test_queries_that_stand_out_of_order_are_refused():
    with pytest.raises(ValueError, match="the queries stand in their order"):
        paged(SharedRun(0, 2, 8), query_starts=[3, 0, 2, 4])
    paged(query_starts=[3, 0, 2, 4])


def test_a_captured_layout_holds_the_device_to_the_same_promises():
    runs, keys = shared_arrays([SharedRun(1, 2, 8)], 2, 3)
    assert runs == [[1, 2, 8], [0, 0, 0]] and keys == [0, 8, 8]
    shared = SharedTables(*(torch.tensor(x, dtype=torch.int32) for x in (runs, keys)))
    numbers = [[0, 2, 4], [1, 2, 1], [12, 11, 9], [TABLES[3], *TABLES[:2]]]
    layout = CapturedPagedAttention.of(
        SequenceTables(*(torch.tensor(x, dtype=torch.int32) for x in numbers), shared),
        queries=2,
        capacity=12,
        slot_mapping=torch.zeros(6, dtype=torch.int64),
        key_cache=CACHE,
        value_cache=CACHE,
        block_size=4,
    )
    assert layout.tables(CPU).shared is shared and layout.most_shared_queries() == 6
    assert layout.in_force().shared_runs == [SharedRun(1, 2, 8)]
    shared.runs[0, 0] = 0
    with pytest.raises(ValueError, match="not the same ones"):
        layout.in_force()


def picked(rows, runs, likely, most_blocks=320):
    schedule, programs = pick_shared(
        rows, runs=runs, likely=likely, kv_heads=8, most_blocks=most_blocks, dim=128, places=132
    )
    return schedule.rows, programs


def test_a_tile_holds_a_run():
    assert picked(16, 64, 32) == (16, 1) and picked(17, 64, 32) == picked(32, 64, 32) == (32, 1)
    assert picked(64, 64, 32) == (32, 1)  # two tiles


def test_high_tiles_with_a_multiprocessor_each_keep_more_in_flight():
    shape = {"runs": 64, "most_blocks": 17, "dim": 128, "places": 132}
    assert pick_shared(48, likely=32, kv_heads=2, **shape) == (SHARED_DEEP, 1)
    assert pick_shared(32, likely=32, kv_heads=8, **shape) == (SHARED_HIGH, 1)


def test_programs_share_the_keys_of_few_runs_in_low_tiles():
    assert picked(16, 8, 4) == (16, 4) and picked(16, 2, 1) == (16, 16)
    assert picked(32, 2, 1) == (16, 8) and picked(16, 2, 1, most_blocks=3) == (16, 3)
    assert SHARED_LOW.rows <= SPLIT_ROWS and all(s.ring % 2 == 1 for s in SHARED)


def test_they_do_not_where_their_blocks_would_take_too_much_memory():
    assert picked(32, 8, 4, most_blocks=230) == (16, 2)
    assert picked(32, 8, 4) == (32, 1)  # 364 MB
