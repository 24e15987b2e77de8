"""What `pick` chooses for gradient folds, judged by an H200's times at shapes not fitted.

No GPU is needed: every schedule was timed at every shape, but those that are newer than the times.
"""

from itertools import product

import pytest
import torch

from rl_consistency.kernels.gradient_fold.schedules import (
    POINTER,
    TMA,
    WIDE,
    expected_us,
    pick,
)
from tests.kernels.random_times import mean_and_lowest, timed_works

H200 = 132
FOLDS = timed_works("folds", "fold_schedules")
JUDGES = [timed for timed in FOLDS if not timed.fitted]

SMALL = 4_000_000
"""Elements of a gradient below which tiles leave multiprocessors idle."""


TIMED = {s.name: s for s in TMA if s.name in FOLDS[0].us}


def share(timed, cost=expected_us):
    """Time of the best schedule by that of the one expected to be the best, among those timed."""
    chosen = min(TIMED.values(), key=lambda s: cost(s, *timed.shape, H200))
    return timed.best_us / timed.us[chosen.name]


def sized(times, small):
    return [timed for timed in times if (timed.shape[1] * timed.shape[2] < SMALL) == small]


@pytest.mark.parametrize(("small", "bars"), [(True, (0.96, 0.79)), (False, (0.98, 0.90))])
def test_the_choice_is_nearly_the_best_schedule_at_shapes_nobody_fitted(small, bars):
    shares = mean_and_lowest(map(share, sized(JUDGES, small)))
    assert all(found >= bar for found, bar in zip(shares, bars, strict=True)), shares


def test_a_choice_by_the_number_of_tiles_alone_fails_the_bar():
    """The negative control of the test above."""

    def tiles(schedule, tokens, n, k, processors):
        return -(-schedule.tiles(n, k) // processors)

    assert mean_and_lowest(share(t, tiles) for t in sized(JUDGES, True))[0] < 0.9


def test_a_schedule_by_descriptor_is_picked_wherever_descriptors_are_possible():
    sizes = (1, 7, 64, 640, 704, 1100, 4096, 151936)
    for tokens, n, k in product((1, 17, 300, 16384, 40000), sizes, sizes):
        for processors in (1, 108, H200):
            picked = pick(tokens, n, k, torch.bfloat16, tma=True, processors=processors)
            assert picked in TMA
            picked = pick(tokens, n, k, torch.float16, tma=False, processors=processors)
            assert picked in POINTER
            picked = pick(tokens, n, k, torch.float32, tma=True, processors=processors)
            assert picked in WIDE
