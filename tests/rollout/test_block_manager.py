"""Blocks are counted, shared by content once computed, evicted in order, and forgotten on reset."""

import random

from rl_consistency.rollout.block_manager import BlockManager
from tests.rollout.device.launches import sample_of

SIZE = 4


def admit(blocks, tokens, *, computed=True):
    sequence = sample_of(tokens)
    assert allocate(blocks, sequence)
    if computed:
        compute(blocks, sequence)
    return sequence


def allocate(blocks, sequence):
    """Like the scheduler: tokens in shared blocks count as computed."""
    match = blocks.match_prefix(sequence)
    sequence.num_computed_tokens = len(match.block_ids) * SIZE
    return blocks.allocate(sequence, match)


def compute(blocks, sequence, upto=None):
    sequence.num_computed_tokens = sequence.num_tokens if upto is None else upto
    blocks.publish(sequence)


def test_matched_idle_blocks_do_not_count_as_free():
    blocks = BlockManager(3, SIZE)
    blocks.release(admit(blocks, [1] * 8))
    sequence = sample_of([1] * 8 + [2] * 5)
    match = blocks.match_prefix(sequence)
    assert len(match.block_ids) == 2 and blocks.num_free_blocks == 3
    assert not blocks.allocate(sequence, match)  # 2 matched, 2 more needed, 1 left
    assert blocks.num_free_blocks == 3


def test_the_last_known_token_is_always_computed():
    blocks = BlockManager(8, SIZE)
    admit(blocks, [1] * 8)
    assert admit(blocks, [1] * 8, computed=False).num_computed_tokens == 4


def test_a_hash_collision_does_not_join_two_contents():
    # In CPython hash(-1) == hash(-2), so these keys collide and only comparison tells them apart.
    assert hash((0, (-1,) * SIZE)) == hash((0, (-2,) * SIZE))
    blocks = BlockManager(8, SIZE)
    admit(blocks, [-1] * 5)
    assert blocks.match_prefix(sample_of([-2] * 5)).block_ids == []


def test_a_block_is_awaited_from_allocation_until_it_is_computed():
    blocks = BlockManager(8, SIZE)
    first = admit(blocks, [1] * 9, computed=False)
    sibling = sample_of([1] * 9)
    match = blocks.match_prefix(sibling)
    assert match.block_ids == [] and match.awaited_block == first.block_table[0]
    compute(blocks, first, upto=5)
    match = blocks.match_prefix(sibling)
    assert match.block_ids == first.block_table[:1]
    assert match.awaited_block == first.block_table[1]
    assert not blocks.is_awaited(first.block_table[0])
    compute(blocks, first)
    match = blocks.match_prefix(sibling)
    assert match.block_ids == first.block_table[:2] and match.awaited_block is None


def test_blocks_released_before_they_were_computed_are_not_found():
    blocks = BlockManager(8, SIZE)
    first = admit(blocks, [1] * 9, computed=False)
    compute(blocks, first, upto=6)
    awaited = first.block_table[1]
    blocks.release(first)
    match = blocks.match_prefix(sample_of([1] * 9))
    assert len(match.block_ids) == 1 and match.awaited_block is None
    assert not blocks.is_awaited(awaited)


def test_a_second_copy_of_a_content_stays_private_and_its_children_are_found():
    blocks = BlockManager(8, SIZE)
    first, second = admit(blocks, [1] * 3), admit(blocks, [1] * 3)
    for sequence, tail in ((first, [1, 2]), (second, [1, 3, 3, 3, 3, 3])):
        for token in tail:
            sequence.append(token, -1.0)
            assert blocks.grow(sequence)
            compute(blocks, sequence)
    match = blocks.match_prefix(sample_of([1] * 4 + [3] * 5))
    assert match.block_ids == [first.block_table[0], second.block_table[1]]


def test_released_blocks_are_evicted_least_recent_first_and_children_before_parents():
    blocks = BlockManager(4, SIZE)
    old, new = admit(blocks, [1] * 8), admit(blocks, [2] * 8)
    blocks.release(old)
    blocks.release(new)
    third = admit(blocks, [3] * 4)
    assert len(blocks.match_prefix(sample_of([1] * 9)).block_ids) == 1  # lost its tail only
    assert len(blocks.match_prefix(sample_of([2] * 9)).block_ids) == 2
    blocks.release(third)


def test_grow_counts_pending_and_drafted_tokens():
    blocks = BlockManager(3, SIZE)
    sequence = admit(blocks, [1] * 4)
    sequence.num_pending = 1
    assert blocks.grow(sequence) and len(sequence.block_table) == 2
    assert blocks.grow(sequence, 3) and len(sequence.block_table) == 2
    assert blocks.grow(sequence, 4) and len(sequence.block_table) == 3
    assert not blocks.grow(sequence, 8) and len(sequence.block_table) == 3
    assert blocks.grow(sequence) and len(sequence.block_table) == 3  # kept for the tokens to come


def test_a_block_with_a_pending_token_has_no_name_yet():
    blocks = BlockManager(4, SIZE)
    sequence = admit(blocks, [1, 2, 3])
    sequence.num_pending = 1
    assert blocks.grow(sequence)
    compute(blocks, sequence, upto=4)
    assert blocks.match_prefix(sample_of([1, 2, 3, 4, 5])).block_ids == []
    sequence.num_pending = 0
    sequence.append(4, -1.0)
    blocks.publish(sequence)
    assert blocks.match_prefix(sample_of([1, 2, 3, 4, 5])).block_ids == sequence.block_table


def test_blocks_to_spare_are_left():
    blocks = BlockManager(3, SIZE)
    sequence = sample_of([1] * 8)
    assert not blocks.allocate(sequence, blocks.match_prefix(sequence), spare=2)
    assert blocks.allocate(sequence, blocks.match_prefix(sequence), spare=1)


def test_reset_takes_all_blocks_back_and_forgets_all_contents():
    blocks = BlockManager(4, SIZE)
    blocks.release(admit(blocks, [1] * 9))
    admit(blocks, [2] * 9)
    blocks.reset()
    assert blocks.num_free_blocks == 4
    assert blocks.match_prefix(sample_of([1] * 9)).block_ids == []
    assert blocks.match_prefix(sample_of([2] * 9)).block_ids == []


def test_distrusted_contents_are_found_no_more_and_kept_by_their_holders():
    blocks = BlockManager(8, SIZE)
    first = admit(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = admit(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    shared = first.block_table[:2]
    assert second.block_table[:2] == shared and second.num_borrowed_blocks == 2
    blocks.distrust(first)
    blocks.release(first)
    assert blocks.match_prefix(sample_of([1, 2, 3, 4, 5, 6, 7, 8, 9])).block_ids == []
    assert second.block_table[:2] == shared and blocks.num_free_blocks == 5
    again = admit(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert again.num_borrowed_blocks == 0 and not {*again.block_table} & {*second.block_table}
    blocks.release(second)
    found = blocks.match_prefix(sample_of([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert found.block_ids == again.block_table[:2]


def test_a_sequence_alone_takes_no_block_of_others_and_gives_none():
    blocks = BlockManager(8, SIZE)
    alone = sample_of([1, 2, 3, 4, 5])
    alone.alone = True
    for _ in range(2):
        assert allocate(blocks, alone) and alone.num_borrowed_blocks == 0
        compute(blocks, alone)
        assert blocks.match_prefix(sample_of([1, 2, 3, 4, 5])).block_ids == []
        blocks.release(alone)
        admit(blocks, [9] * 5)


def test_without_sharing_nothing_is_found_or_awaited():
    blocks = BlockManager(8, SIZE, share_prefixes=False)
    admit(blocks, [1] * 9)
    match = blocks.match_prefix(sample_of([1] * 9))
    assert match.block_ids == [] and match.awaited_block is None


def test_no_block_ever_holds_two_contents_under_a_random_load():
    """Replays random requests against a plain record of what each physical slot was given."""
    rng = random.Random(0)
    blocks = BlockManager(12, SIZE)
    slots = {}  # (block, offset) -> its token's prefix
    live = []
    num_hits = 0
    for _ in range(3000):
        if live and rng.random() < 0.3:
            blocks.release(live.pop(rng.randrange(len(live))))
        elif live and rng.random() < 0.6:
            sequence = rng.choice(live)
            if sequence.num_uncomputed_tokens == 0 and sequence.num_tokens < 24:
                sequence.append(rng.randrange(2), -1.0)
                if not blocks.grow(sequence):
                    sequence.token_ids.pop()
            end = min(sequence.num_tokens, sequence.num_computed_tokens + rng.randint(1, 5))
            for position in range(sequence.num_computed_tokens, end):
                slot = (sequence.block_table[position // SIZE], position % SIZE)
                slots[slot] = tuple(sequence.token_ids[: position + 1])
            compute(blocks, sequence, upto=end)
        else:
            sequence = sample_of([rng.randrange(2) for _ in range(rng.randint(1, 14))])
            if allocate(blocks, sequence):
                live.append(sequence)
                num_hits += sequence.num_computed_tokens > 0
        for sequence in live:
            for position in range(sequence.num_computed_tokens):
                slot = (sequence.block_table[position // SIZE], position % SIZE)
                assert slots[slot] == tuple(sequence.token_ids[: position + 1])
        held = {block for sequence in live for block in sequence.block_table}
        assert len(held) + blocks.num_free_blocks == blocks.num_blocks
    assert num_hits > 100
