"""A rank that differs is named on every rank, with what differs."""

import pytest

from rl_consistency.distributed.world import require_same_facts
from rl_consistency.numerics.errors import ConsistencyError

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
