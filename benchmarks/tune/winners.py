"""The winners that a bench runs with: those it measures, whatever the user's cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch as attribute

import torch

from rl_consistency.kernels.core.cache import tuned_schedules
from rl_consistency.kernels.core.cache.tuned_schedules import TunedSchedules


@contextmanager
def own_winners(device: torch.device) -> Iterator[TunedSchedules]:
    """Inside the block the device has the winners of an empty store in memory, and those kept in
    it; the user's come back behind it."""
    store = TunedSchedules(None, {})
    with attribute.dict(tuned_schedules._by_device, {device: store}):
        tuned_schedules.forget_picks()
        yield store
    tuned_schedules.forget_picks()
