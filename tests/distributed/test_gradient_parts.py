"""A step's sequences are cut alike for any number of ranks, and every leaf is computed once."""

from itertools import chain

import pytest

from rl_consistency.distributed.gradient_parts import PartOrder, cut

ORDERS = [PartOrder(1), PartOrder(4), PartOrder(7), PartOrder(2, 3), PartOrder(4, 4)]


def test_the_cut_is_the_one_of_the_order():
    for count in (0, 1, 5, 16, 17):
        for found in (cut(count, parts) for parts in (1, 3, 5)):
            assert list(chain(*found)) == list(range(count))
            assert max(map(len, found)) - min(map(len, found)) <= 1
    assert [list(leaf) for leaf in PartOrder(3).parts(7)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert PartOrder(2, 2).parts(9) == PartOrder(4).parts(9)


def test_numbers_of_leaves_are_positive():
    with pytest.raises(ValueError, match="positive"):
        PartOrder(4, 0)


def worlds(order, ranks_per_node):
    for world_size in range(1, order.count + 1):
        try:
            inner_size = order.inner_size(world_size, ranks_per_node)
        except ValueError:
            continue
        yield world_size, inner_size


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_every_leaf_is_computed_once_and_the_ranks_agree(order, ranks_per_node):
    for world_size, inner_size in worlds(order, ranks_per_node):
        by_rank = [order.rounds(r, world_size, inner_size) for r in range(world_size)]
        assert len({len(rounds) for rounds in by_rank}) == 1
        computed = [r.part for rounds in by_rank for r in rounds if r.part is not None]
        assert sorted(computed) == list(range(order.count))
        for rounds in zip(*by_rank, strict=True):
            assert len({(r.index, r.groups) for r in rounds}) == 1
            for first in range(0, world_size, inner_size):
                group = rounds[first : first + inner_size]
                assert {r.senders for r in group} == {sum(r.part is not None for r in group)}
                assert all((r.part is not None) == (i < r.senders) for i, r in enumerate(group))
        assert [r.groups for r in by_rank[0]].count(0) < len(by_rank[0])
        assert by_rank[0][-1].groups


def test_without_groups_rank_r_has_leaf_jw_plus_r():
    for world_size in range(1, 8):
        assert PartOrder(7).inner_size(world_size, 4) == world_size
        for rank in range(world_size):
            for j, round in enumerate(PartOrder(7).rounds(rank, world_size, world_size)):
                leaf = j * world_size + rank
                assert round.part == (leaf if leaf < 7 else None)


def test_a_group_of_leaves_stays_inside_a_node_where_it_can():
    assert PartOrder(4, 4).inner_size(8, 4) == 4
    assert PartOrder(4, 4).inner_size(8, 2) == 2
    assert PartOrder(4, 4).inner_size(8, 8) == 4
    assert PartOrder(8, 2).inner_size(16, 4) == 8  # two groups, so each spans two nodes


def test_more_processes_than_leaves_are_refused_with_the_allowed_numbers():
    with pytest.raises(ValueError, match="5 processes cannot share 4 x 1.*: 1, 2, 3, 4[.]"):
        PartOrder(4).inner_size(5, 5)
    with pytest.raises(ValueError, match="Allowed numbers of processes: 1, 2, 4[.]"):
        PartOrder(2, 2).inner_size(3, 3)


def test_fewer_sequences_than_leaves_are_refused():
    with pytest.raises(ValueError, match="3 sequences cannot be cut into 4 leaves.*at most 3"):
        PartOrder(4).parts(3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_micro_batches_stay_inside_a_leaf_and_are_as_many_for_each(size):
    order = PartOrder(3)  # of 3, 4 and 4 sequences
    passes = [order.micro_batches(11, leaf, size) for leaf in range(3)]
    assert {len(batches) for batches in passes} == {-(-4 // size)}
    for leaf, batches in zip(order.parts(11), passes, strict=True):
        assert list(chain(*batches)) == list(leaf)
        assert max(map(len, batches)) <= size
    assert order.micro_batches(11, None, size) == [range(0)] * -(-4 // size)


@pytest.mark.parametrize("size", [0, 5])
def test_a_micro_batch_larger_than_a_leaf_is_refused(size):
    with pytest.raises(ValueError, match=f"micro-batch of {size} .* at most 4 per leaf"):
        PartOrder(3).micro_batches(11, 0, size)
