"""A layout whose numbers lie on the device: what it tells the host, and what it reads."""

from dataclasses import fields

import pytest
import torch

from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PagedAttention,
    SequenceTables,
)

CACHE = [torch.zeros(4, 4, 1, 16)]


def captured(query_len, context_len, tables, queries=2, capacity=12):
    return CapturedPagedAttention.of(
        SequenceTables(
            torch.arange(0, queries * len(query_len), queries, dtype=torch.int32),
            *(torch.tensor(x, dtype=torch.int32) for x in (query_len, context_len, tables)),
        ),
        queries=queries,
        capacity=capacity,
        slot_mapping=torch.zeros(queries * len(query_len), dtype=torch.int64),
        key_cache=CACHE,
        value_cache=CACHE,
        block_size=4,
    )


def test_a_captured_layout_is_read_when_it_is_used():
    tables = [[2, 0, 3], [3, 1, 2]]
    layout = captured([1, 2], [5, 9], tables)
    for contexts in ([5, 9], [7, 9]):
        layout.numbers.context_len[0] = contexts[0]
        expected = PagedAttention(
            query_starts=[0, 2],
            query_lens=[1, 2],
            context_lens=contexts,
            block_tables=tables,
            slot_mapping=torch.zeros(4, dtype=torch.int64),
            key_cache=CACHE,
            value_cache=CACHE,
            block_size=4,
        ).plan(2, None)
        found = layout.plan(2, None)
        assert found.query_positions[0, 0] == contexts[0] - 1
        for part in fields(expected):
            assert torch.equal(getattr(found, part.name), getattr(expected, part.name))
    assert layout.tables(torch.device("cpu")) is layout.numbers


def test_a_captured_layout_tells_the_host_upper_bounds():
    layout = captured([1, 2], [5, 9], [[2, 0, 3], [3, 1, 2]])
    assert list(layout.query_starts) == [0, 2]
    assert layout.query_lens == [2, 2] and layout.context_lens == [12, 12]
    tiles = layout.tiles(torch.device("cpu"), 3, 4)
    assert sorted(tiles.tolist()) == [[0, 0], [0, 4], [1, 0], [1, 4]]
    assert layout.tiles(torch.device("cpu"), 3, 4) is tiles


def test_rows_behind_a_sequences_queries_are_owned_by_nobody():
    assert captured([1, 1], [5, 9], [[2, 0, 3]] * 2, queries=1).owns(2)
    assert not captured([2, 2], [5, 9], [[2, 0, 3]] * 2).owns(4)


def test_no_sequence_has_more_queries_than_the_cache_holds():
    layout = captured([1, 2], [5, 3], [[2, 0, 3]] * 2, queries=8, capacity=6)
    assert layout.query_lens == [6, 6] and list(layout.query_starts) == [0, 8]


def test_a_captured_layout_whose_tables_are_too_narrow_is_refused():
    with pytest.raises(ValueError, match="contexts of up to 13 tokens but .* hold 12"):
        captured([1, 1], [5, 9], [[2, 0, 3]] * 2, capacity=13)


def test_a_captured_layout_is_not_split_by_what_the_host_knows():
    layout = captured([1, 2], [1, 2], [[2, 0, 3], [3, 1, 2]], capacity=2)
    assert layout.by_past() == (None, layout)
