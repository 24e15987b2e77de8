"""What `pick` and the rule for the library choose, judged by an H200's times at shapes not fitted.

No GPU is needed: every schedule was timed at every shape.
"""

import pytest
import torch

from rl_consistency.kernels.matmul.cublaslt import LIBRARY_ROWS, prefers_library
from rl_consistency.kernels.matmul.schedules import (
    CANDIDATES,
    pick,
)
from tests.kernels.random_times import BANDS, mean_and_lowest, timed_works

PRODUCTS = timed_works("products", "schedules")
JUDGES = [timed for timed in PRODUCTS if not timed.fitted]
BY_NAME = {s.name: s for s in CANDIDATES}

BARS = {
    BANDS[0]: (1.85, 1.0),
    BANDS[1]: (1.22, 0.80),
    BANDS[2]: (1.0, 1.0),
    BANDS[3]: (1.0, 1.0),
}
"""Time of the library by that of the choice: geometric mean and lowest. The library chosen is 1."""

SHARES = {
    BANDS[0]: (0.99, 0.95),
    BANDS[1]: (0.96, 0.80),
    BANDS[2]: (0.95, 0.75),
    BANDS[3]: (0.99, 0.95),
}
"""Time of the best of all by that of the choice."""

TRITON_SHARES = {
    BANDS[0]: (0.99, 0.95),
    BANDS[1]: (0.98, 0.92),
    BANDS[2]: (0.97, 0.85),
    BANDS[3]: (0.98, 0.92),
}
"""Time of the best schedule by that of the one picked, which runs where no certificate is had."""


def test_about_half_of_the_shapes_judges_in_every_band():
    for low, high in BANDS:
        fitted = [timed.fitted for timed in PRODUCTS if low <= timed.shape[1] <= high]
        assert 0.3 < sum(fitted) / len(fitted) < 0.7


def within(band):
    return [timed for timed in JUDGES if band[0] <= timed.shape[1] <= band[1]]


def picked_us(timed):
    layout, m, n, k = timed.shape
    return timed.us[pick(m, n, k, torch.bfloat16, layout, True).name]


def library_chosen(timed):
    return prefers_library(timed.shape[1], LIBRARY_ROWS, torch.bfloat16)


def chosen_us(timed):
    return timed.library_us if library_chosen(timed) else picked_us(timed)


def assert_reached(found, bars):
    assert all(share >= bar for share, bar in zip(found, bars, strict=True)), (found, bars)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_choice_keeps_up_with_the_library_at_shapes_nobody_fitted(band):
    ratios = mean_and_lowest(timed.library_us / chosen_us(timed) for timed in within(band))
    assert_reached(ratios, BARS[band])


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_choice_is_nearly_the_best_of_all_at_shapes_nobody_fitted(band):
    shares = mean_and_lowest(
        min(timed.best_us, timed.library_us) / chosen_us(timed) for timed in within(band)
    )
    assert_reached(shares, SHARES[band])


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_schedule_picked_is_nearly_the_best_one_at_shapes_nobody_fitted(band):
    shares = mean_and_lowest(timed.best_us / picked_us(timed) for timed in within(band))
    assert_reached(shares, TRITON_SHARES[band])


def test_one_schedule_for_all_shapes_fails_the_bars(monkeypatch):
    """The negative control of the tests above."""
    monkeypatch.setitem(globals(), "pick", lambda *_: BY_NAME["tma-64x128x64-w4-s4"])
    with pytest.raises(AssertionError):
        test_the_schedule_picked_is_nearly_the_best_one_at_shapes_nobody_fitted(BANDS[3])
