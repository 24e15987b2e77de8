"""Collectives that name themselves when they fail, and what must be equal on all ranks."""

import os
import re
import signal
import time

import pytest
import torch
from torch.distributed import ReduceOp

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import CollectiveError, World, require_same_facts
from rl_consistency.numerics.errors import ConsistencyError
from tests.ranks import telling, wait_for


def test_without_a_process_group_the_world_is_one_process():
    world = World.join(torch.device("cpu"))
    assert (world.rank, world.size, world.ranks_per_node) == (0, 1, 1)
    assert world.gather("facts", "a") == ["a"]
    assert world.reduce("numbers", [3, -1], ReduceOp.SUM) == [3, -1]
    inner, across = world.split(1)
    vector = torch.arange(3.0)
    assert inner.exchange("x", vector, 1)().tolist() == [[0, 1, 2]]
    assert across.all_gather("x", vector) is vector


def facts(world):
    inner, across = world.split(2)
    return (
        (world.rank, world.size, world.ranks_per_node),
        world.gather("facts", {"rank": world.rank}),
        world.reduce("sums", [world.rank, 2**60], ReduceOp.SUM),
        world.reduce("maxima", [world.rank, -world.rank], ReduceOp.MAX),
        (inner.rank, inner.size, across.rank, across.size),
    )


def test_ranks_know_who_they_are_and_share_facts(run_ranks):
    for rank, found in enumerate(run_ranks(4, facts)):
        places, gathered, sums, maxima, groups = found
        assert places == (rank, 4, 4)
        assert gathered == [{"rank": r} for r in range(4)]
        assert sums == [6, 2**62] and maxima == [3, 0]
        assert groups == (rank % 2, 2, rank // 2, 2)


def tensors_of_all(world):
    table = torch.arange(12.0).reshape(3, 4) + world.rank
    halves = torch.tensor([1.0, world.rank]).bfloat16()
    found = world.gather("tensors", [table[1:, ::2], halves, table[:0], torch.tensor(world.rank)])
    return [[(t.dtype, t.shape, t.tolist()) for t in each] for each in found]


def test_tensors_travel_with_dtype_and_shape(run_ranks):
    for found in run_ranks(2, tensors_of_all):
        assert found == [
            [
                (torch.float32, (2, 2), [[4.0 + rank, 6.0 + rank], [8.0 + rank, 10.0 + rank]]),
                (torch.bfloat16, (2,), [1.0, rank]),
                (torch.float32, (0, 4), []),
                (torch.int64, (), rank),
            ]
            for rank in range(2)
        ]


def exchanged(world, senders):
    group, _ = world.split(world.size)
    vector = torch.arange(2.0 * world.size) + 100 * world.rank
    return group.exchange("vector", vector, senders)().tolist()


@pytest.mark.parametrize("senders", [0, 1, 2, 3])
def test_only_senders_send(run_ranks, senders):
    for rank, received in enumerate(run_ranks(3, exchanged, senders)):
        assert received == [
            [100 * sender + 2 * rank, 100 * sender + 2 * rank + 1] for sender in range(senders)
        ]


def step_with_a_loss(world, how, over):
    total = OrderedSum(world, PartOrder(6))
    with telling(over):
        for round in total.step():
            if world.rank == 1 and round.index == 1:
                how(over)
            total.add("layer", torch.ones(6))
        return total.take("layer")


def killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [killed, wait_for])
def test_a_lost_rank_stops_the_others_with_the_name_of_the_collective(run_ranks, tmp_path, how):
    began = time.monotonic()
    given = (step_with_a_loss, how, tmp_path / "over")
    found = run_ranks(3, *given, timeout=2, expects_errors=True)
    assert time.monotonic() - began < 20
    for rank in (0, 2):
        assert type(found[rank]) is CollectiveError
        text = f"gradient layer, round [12] of 2: all-to-all between ranks 0, 1, 2: rank {rank} "
        assert re.match(text, str(found[rank]))
    assert (found[1] is None) == (how is killed)


def late_fact(world, over):
    if world.rank == 0:
        wait_for(over)
    with telling(over):
        world.gather("digest of weights", "")


def test_a_fact_that_does_not_come_is_named(run_ranks, tmp_path):
    _, found = run_ranks(2, late_fact, tmp_path / "over", timeout=1, expects_errors=True)
    assert type(found) is CollectiveError
    assert str(found).startswith("digest of weights between ranks 0, 1: rank 1 gave up")
    assert "within 1 s" in str(found)


def one_fails(world, error):
    with world.agreed("first"):
        pass
    try:
        with world.agreed("second"):
            if world.rank == 1:
                raise error
    except (ConsistencyError, ValueError, TypeError, OSError) as raised:
        return type(raised), str(raised)


@pytest.mark.parametrize("error", [ConsistencyError("broken"), OSError("full"), TypeError("no")])
def test_an_error_of_one_rank_is_raised_on_all(run_ranks, error):
    kind = ConsistencyError if isinstance(error, ConsistencyError) else ValueError
    expected = [(kind, f"rank 1: {error}")] * 3
    expected[1] = type(error), str(error)
    assert run_ranks(3, one_fails, error) == expected


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ConsistencyError("gloo/transport"), ValueError("no")]
)
def test_an_error_that_is_no_library_s_collective_passes_as_it_is(error):
    alone = World.join(torch.device("cpu"))
    with pytest.raises(type(error)) as raised, alone.naming_others("a sum"):
        raise error
    assert raised.value is error


def from_first(world):
    return world.from_first("a place", lambda: ["rank", world.rank])


def test_rank_0_works_for_all(run_ranks):
    assert run_ranks(3, from_first) == [["rank", 0]] * 3
    assert from_first(World.join(torch.device("cpu"))) == ["rank", 0]


BEFORE = "before step 0"


def compare_facts(world, changes):
    facts = {"recipe": "1f", "data": "2e", "num_threads": "1"} | changes.get(world.rank, {})
    require_same_facts(world, facts, when=BEFORE)


def test_equal_facts_pass(run_ranks):
    assert run_ranks(3, compare_facts, {}) == [None] * 3


OTHER_DATA, OTHER_RECIPE = {"data": "3d"}, {"recipe": "0", "num_threads": "2"}
DIFFERENT = [
    ({2: OTHER_DATA}, "rank 2 .* data (3d != 2e)."),
    (
        {1: OTHER_RECIPE, 2: OTHER_DATA},
        "rank 1 .* recipe (0 != 1f), and 1 more; rank 2 .* data (3d != 2e).",
    ),
    ({1: {"triton": "3.6"}}, "rank 1 .* triton (3.6 != absent)."),
    (
        {0: {"triton": "3.6"}},
        "rank 1 .* triton (absent != 3.6); rank 2 .* triton (absent != 3.6).",
    ),
]


@pytest.mark.parametrize(("changes", "text"), DIFFERENT)
def test_a_rank_that_differs_is_named_on_every_rank(run_ranks, changes, text):
    expected = f"{BEFORE}: {text}".replace(".*", "differs from rank 0 in")
    for error in run_ranks(3, compare_facts, changes, expects_errors=True):
        assert type(error) is ConsistencyError and str(error).startswith(expected)
