"""Which sequences of a step share keys, found from their cache blocks alone."""

import random

import numpy as np
import pytest
import torch

from rl_consistency.kernels.attention.layout import MOST_SHARERS, SHARED_BLOCK, SharedRun
from rl_consistency.rollout.device import device_state
from rl_consistency.rollout.device.device_state import DeviceState
from rl_consistency.rollout.device.shared_prefixes import arranged, most_runs

CPU = torch.device("cpu")
BLOCK, WIDTH, DUMMY = 16, 40, 9999


def tables_of(*rows):
    return np.array([row + [DUMMY] * (WIDTH - len(row)) for row in rows], dtype=np.int32)


def pasts_of(*tokens):
    return np.array(tokens, dtype=np.int64)


def group(first, blocks, sizes):
    """Tables that begin with the same blocks and go on with their own."""
    own = iter(range(first + 1000, first + 2000))
    return [[*range(first, first + blocks), *(next(own) for _ in range(n))] for n in sizes]


def found(rows, pasts):
    """Members of each run, as places in `rows`, and its keys."""
    arrangement = arranged(tables_of(*rows), pasts_of(*pasts), BLOCK)
    if arrangement is None:
        return []
    order, runs = arrangement
    assert sorted(order) == list(range(len(rows)))
    return [(set(order[r.first : r.first + r.count]), r.keys) for r in runs]


def test_the_samples_of_prompts_that_stand_mixed_are_brought_together():
    one, other = group(0, 20, [1, 2, 3]), group(100, 32, [1, 1])
    rows = [one[0], other[0], one[1], other[1], one[2]]
    pasts = [16 * len(row) - 5 for row in rows]
    assert found(rows, pasts) == [({0, 2, 4}, 256), ({1, 3}, 512)]


def test_only_keys_before_the_queries_of_each_are_shared():
    rows = group(0, 16, [1, 1])
    assert found(rows, [256, 260]) == [({0, 1}, 256)]
    assert found(rows, [255, 260]) == [({0, 1}, 128)]
    assert found(rows, [127, 260]) == []


def test_what_is_not_entered_yet_is_not_shared():
    """Behind a sequence's blocks all tables hold the dummy block."""
    assert found([[0], [1], [2]], [16, 16, 16]) == []
    rows = [list(range(8)), list(range(8))]
    assert found(rows, [128, 128]) == [({0, 1}, 128)]


def test_groups_are_shared_rather_than_a_beginning_common_to_all():
    system = list(range(8))
    rows = [[*system, *g] for first in (100, 200, 300) for g in group(first, 24, [1, 1, 1])]
    pasts = [16 * len(row) - 3 for row in rows]
    assert sorted(keys for _, keys in found(rows, pasts)) == [512] * 3
    lonely = [[*system, 500 + i] for i in range(4)]
    assert found(lonely, [140] * 4) == [({0, 1, 2, 3}, 128)]


def test_a_larger_group_makes_several_runs_of_about_equal_size():
    for size, counts in ((8, [8]), (9, [5, 4]), (16, [8, 8]), (17, [6, 6, 5])):
        rows = group(0, 16, [1] * size)
        runs = found(rows, [260] * size)
        assert sorted((len(members) for members, _ in runs), reverse=True) == counts
        assert set().union(*(members for members, _ in runs)) == set(range(size))
        assert max(counts) <= MOST_SHARERS


def test_too_little_to_gain_changes_nothing():
    rows = group(0, 8, [20, 20])
    assert found(rows, [16 * 28 - 1] * 2) == [({0, 1}, 128)]
    others = [list(range(5000 + 40 * i, 5028 + 40 * i)) for i in range(2)]
    assert found(rows + others, [16 * 28 - 1] * 4) == []


def test_runs_beyond_the_room_of_a_call_are_those_that_save_least():
    rows = [row for i in (2, 0, 3, 1) for row in group(100 * i, 8 * (1 + i), [1, 1])]
    runs = found(rows, [16 * len(row) - 1 for row in rows])
    assert most_runs(8) == 2 and runs == [({4, 5}, 512), ({0, 1}, 384)]


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_random_trees_hold_the_same_blocks(seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(1, 6)):
        base = draw.choice(rows)[: draw.randint(0, 30)] if rows else []
        base = base + draw.sample(range(100_000), draw.randint(0, 38 - len(base)))
        for _ in range(draw.randint(1, 12)):
            rows.append(base + draw.sample(range(100_000), draw.randint(1, WIDTH - len(base))))
    draw.shuffle(rows)
    pasts = [draw.randint(max(16 * len(row) - 40, 0), 16 * len(row) - 1) for row in rows]
    seen = set()
    for members, keys in found(rows, pasts):
        assert 2 <= len(members) <= MOST_SHARERS and keys % SHARED_BLOCK == 0 and keys > 0
        assert seen.isdisjoint(members)
        seen |= members
        assert keys <= min(pasts[i] for i in members)
        assert len({tuple(rows[i][: keys // BLOCK]) for i in members}) == 1


def test_an_arrangement_is_kept_until_slots_or_admissions_change(monkeypatch):
    calls = []

    def counted(*args):
        calls.append(1)
        return arranged(*args)

    monkeypatch.setattr(device_state, "arranged", counted)
    state = DeviceState(3, width=WIDTH, block_size=BLOCK, dummy_block=DUMMY, device=CPU)
    state._tables[:3] = tables_of(*group(0, 16, [1, 1, 1]))
    slots, pasts = np.array([2, 0]), pasts_of(257, 258)
    first = state.arrangement(slots, pasts, width=1)
    assert first is not None and first[1] == [SharedRun(0, 2, 256)]
    assert state.arrangement(slots, pasts + 1, width=1) is first and len(calls) == 1
    state.arrangement(slots, pasts, width=4)
    state._num_admitted += 1
    state.arrangement(slots, pasts, width=1)
    state.arrangement(slots[::-1], pasts, width=1)
    assert len(calls) == 4
