"""A rank that differs is named on every rank, with what differs."""

import pytest
import torch

from rl_consistency.distributed.digests import require_same_facts, require_same_tensors
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import parameter_digest

BEFORE = "before step 0"


def compare_facts(world, changes):
    facts = {"recipe": "1f", "data": "2e", "num_threads": "1"} | changes.get(world.rank, {})
    require_same_facts(world, facts, when=BEFORE)


def test_equal_facts_pass(run_ranks):
    assert run_ranks(3, compare_facts, {}) == [None] * 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({2: {"data": "3d"}}, "before step 0: rank 2 differs from rank 0 in data (3d != 2e)."),
        (
            {1: {"recipe": "0", "num_threads": "2"}, 2: {"data": "3d"}},
            "before step 0: rank 1 differs from rank 0 in recipe (0 != 1f), and 1 more; "
            "rank 2 differs from rank 0 in data (3d != 2e).",
        ),
        (
            {1: {"triton": "3.6"}},
            "before step 0: rank 1 differs from rank 0 in triton (3.6 != absent).",
        ),
        (
            {0: {"triton": "3.6"}},
            "before step 0: rank 1 differs from rank 0 in triton (absent != 3.6); "
            "rank 2 differs from rank 0 in triton (absent != 3.6).",
        ),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(run_ranks, changes, text):
    for error in run_ranks(3, compare_facts, changes, expects_errors=True):
        assert type(error) is ConsistencyError and str(error).startswith(text)


def compare_weights(world, flipped):
    weights = {"embed": torch.ones(3, 2), "head": torch.zeros(4)}
    if world.rank == flipped:
        weights["head"][1] = -0.0
    return require_same_tensors(world, weights, what="weights", when="after step 3")


def test_equal_weights_pass_with_one_digest(run_ranks):
    found = run_ranks(2, compare_weights, None)
    assert len(set(found)) == 1 and len(found[0]) == len(parameter_digest({}))


def test_one_bit_of_one_tensor_is_named(run_ranks):
    for error in run_ranks(3, compare_weights, 1, expects_errors=True):
        assert type(error) is ConsistencyError
        text = "after step 3: rank 1 differs from rank 0 in weights head ("
        assert str(error).startswith(text) and "more" not in str(error)
