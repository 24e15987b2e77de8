"""How chains of dq go from tile of keys to tile of keys, and sums of dk and dv from head to head:
the programs of a launch, walked as on the device, a bounded number at a time and started in the
order of their ids."""

import random
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels.attention.hopper import backward as copies
from rl_consistency.kernels.attention.hopper.backward import backward_programs
from rl_consistency.kernels.attention.layout import PackedSequences

KEYS, QUERIES = copies.KEYS.value, copies.QUERIES.value
CPU = torch.device("cpu")
MULTIPROCESSORS = 132
"""Of the device whose order of programs is walked; fewer may be free."""


class Pointer:
    """A place in a list, as kernels reach it."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, more):
        return Pointer(self.values, self.at + more)

    def load(self):
        return self.values[self.at]


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """The device functions that say what a program does, as functions of plain numbers."""
    language = SimpleNamespace(
        program_id=lambda axis: 0,
        load=Pointer.load,
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
    )
    monkeypatch.setattr(copies, "gl", language)
    for name in ("ENTRY", "KEYS", "QUERIES", "STAGES"):
        monkeypatch.setattr(copies, name, getattr(copies, name).value)


def steps_of(program, layout, group, window, before=copies.tiles_before.fn):
    """(tile of queries and head, tiles of keys before, whether these are the last) of each step, as
    `fetch_chains` and `leave_chains` find them."""
    query_tiles, first_tiles = layout.query_tiles(CPU, QUERIES)
    sizes = (Pointer(list(layout.query_starts)), Pointer(list(layout.query_lens)))
    first = Pointer(first_tiles.tolist())
    place = (Pointer(program), first, *sizes, window or 0, len(query_tiles))
    _kv_head, _first, heads, first_key, _row, _limit, first_tile, per_head = copies.walk.fn(
        place, group, window is not None
    )
    for step in range(heads * per_head):
        _head, ahead, tile, _slot, _turn = copies.step_at.fn(
            step, first_key, first_tile, per_head, len(query_tiles)
        )
        yield tile, before(first_key, ahead, window or 0, window is not None), ahead < KEYS


def listed(layout, kv_heads, group, multiprocessors=MULTIPROCESSORS, heads=None):
    """The entries of a launch, in the order of their ids."""
    found = backward_programs(layout, CPU, kv_heads, group, multiprocessors, None, heads or group)
    return found.entries.tolist()


def hand_over(programs, steps, resident, choice):
    """Run the programs, at most `resident` at a time.

    Args:
        programs: in the order of their ids, which is the order they start in.
        steps: of a program, see `steps_of`.
        resident: the most that have started and not ended.
        choice: picks which of the waiting or running ones is looked at next.

    Returns:
        (tile of queries and head -> [(first key, tiles left before it, whether it rounds)],
        place -> [heads of the group, in the order in which they were added to dk and dv]).

    Raises:
        RuntimeError: all that run wait.
    """
    counters, chains, added = defaultdict(int), defaultdict(list), defaultdict(list)
    waiting, running = list(programs), []
    while waiting or running:
        while waiting and len(running) < resident:
            program = waiting.pop(0)
            running.append([program, list(steps(program))])
        for one in choice.sample(running, len(running)):
            program, left = one
            _sequence, _key, _kv_head, head, heads, place = program
            if len(added[place]) < head or (left and counters[left[0][0]] < left[0][1]):
                continue
            if left:
                tile, _before, last = left.pop(0)
                chains[tile].append((program[1], counters[tile], last))
                counters[tile] += not last
            if not left:
                running.remove(one)
                added[place] += range(head, head + heads)
            break
        else:
            raise RuntimeError(f"{len(running)} programs wait for ever")
    return chains, added


def seen(layout, heads, window):
    """tile of queries and head -> first keys of the tiles of keys that its queries see, upward."""
    found, tile = {}, 0
    for length in layout.query_lens:
        position = torch.arange(length)
        visible = position[None, :] <= position[:, None]
        if window is not None:
            visible &= position[None, :] > position[:, None] - window
        for queries in visible.split(QUERIES) if length else ():
            keys = queries.any(dim=0).split(KEYS)
            found[tile] = [i * KEYS for i, some in enumerate(keys) if some.any()]
            tile += 1
    return {head * tile + t: keys for head in range(heads) for t, keys in found.items()}


def cases(count):
    """(layout, KV heads, group, window, programs, resident, choice), all random."""
    for seed in range(count):
        choice = random.Random(seed)
        lens = [choice.choice((0, 1, 64, 128, 129, choice.randrange(1, 900))) for _ in range(4)]
        lens.append(choice.randrange(300, 900))
        gaps = [choice.choice((0, 16)) for _ in lens]
        layout = PackedSequences.of([sum(lens[:i]) + sum(gaps[:i]) for i in range(5)], lens)
        kv_heads, group = choice.choice((1, 2, 3)), choice.choice((1, 2, 4, 7))
        window = choice.choice((None, 1, 63, 64, 65, 128, choice.randrange(1, 900)))
        multiprocessors, heads = choice.choice((1, 30, MULTIPROCESSORS)), choice.randint(1, group)
        programs = listed(layout, kv_heads, group, multiprocessors, heads)
        resident = choice.choice((1, 2, 5, MULTIPROCESSORS))
        yield layout, kv_heads, group, window, programs, resident, choice


def continued_upward(chains, expected):
    """Whether every chain takes every tile of keys that its queries see once, upward, finds all
    that came before in memory, and is rounded by the last alone."""
    return chains == {
        tile: [(key, i, key == keys[-1]) for i, key in enumerate(keys)]
        for tile, keys in expected.items()
    }


def test_every_chain_is_continued_upward_and_nobody_waits_for_a_program_that_has_not_started():
    longest = 0
    for layout, kv_heads, group, window, programs, resident, choice in cases(60):
        expected = seen(layout, kv_heads * group, window)
        steps = partial(steps_of, layout=layout, group=group, window=window)
        # One alone: whatever it waited for that has not ended would be waited for in vain.
        for most in (1, resident):
            chains, added = hand_over(programs, steps, most, choice)
            assert continued_upward(chains, expected)
            assert len(added) == sum(-(-n // KEYS) for n in layout.query_lens) * kv_heads
            assert all(heads == list(range(group)) for heads in added.values())
        longest = max(longest, *map(len, expected.values()))
    assert longest > 4


def exchanged(programs, own, steps, choice):
    """A run of the programs, one at a time, with two of `own` in each other's place."""
    first, second = sorted(choice.sample(own, 2))
    programs[first], programs[second] = programs[second], programs[first]
    with pytest.raises(RuntimeError, match="wait for ever"):
        hand_over(programs, steps, 1, choice)


def test_two_tiles_of_a_sequence_and_head_in_each_others_place_wait_for_ever():
    for layout, _heads, group, _window, programs, _resident, choice in cases(20):
        own = [i for i, (s, _key, *heads) in enumerate(programs) if (s, *heads[:2]) == (4, 0, 0)]
        steps = partial(steps_of, layout=layout, group=group, window=None)
        exchanged(programs, own, steps, choice)


def test_two_heads_of_the_same_keys_in_each_others_place_wait_for_ever():
    for seed in range(20):
        choice = random.Random(seed)
        layout = PackedSequences.of([0], [choice.randrange(129, 900)])
        programs = listed(layout, 1, 4, heads=1)
        place = choice.choice(programs)[5]
        own = [i for i, entry in enumerate(programs) if entry[5] == place]
        exchanged(programs, own, partial(steps_of, layout=layout, group=4, window=None), choice)


def test_counts_that_forget_the_window_wait_for_ever():
    layout = PackedSequences.of([0], [600])
    programs = listed(layout, 1, 1)

    def steps(program):
        return steps_of(program, layout, 1, 64, before=lambda first, ahead, w, on: first // KEYS)

    with pytest.raises(RuntimeError, match="wait for ever"):
        hand_over(programs, steps, MULTIPROCESSORS, random.Random(0))


def test_programs_that_do_not_wait_break_the_order():
    layout = PackedSequences.of([0], [900])
    programs = listed(layout, 1, 1)

    def steps(program):
        return steps_of(program, layout, 1, None, before=lambda *place: 0)

    chains, _ = hand_over(programs, steps, MULTIPROCESSORS, random.Random(0))
    assert not continued_upward(chains, seen(layout, 1, None))
    alone, _ = hand_over(programs, steps, 1, random.Random(0))
    assert continued_upward(alone, seen(layout, 1, None))
