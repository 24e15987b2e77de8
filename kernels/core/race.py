"""Two ways to the same bits, timed against each other where they are about to be used."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

ROUNDS = 5
"""Runs of each that count, by turns, after one of each that does not."""

HOLD_CYCLES = 1_000_000
"""Half a millisecond in which the device waits, so that the host's time for a launch is not seen.
"""


def time_ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Time of `one` on the device over that of `other`, by medians; waits for the current stream.

    RuntimeError while a CUDA graph is captured: nothing runs then.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a race runs and waits, which a captured CUDA graph cannot; run it before."
        )
    laps = []
    for call in (one, other) * (ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HOLD_CYCLES)
        start.record()
        call()
        end.record()
        laps.append((start, end))
    laps[-1][1].synchronize()
    times = [start.elapsed_time(end) for start, end in laps][2:]
    return median(times[::2]) / median(times[1::2])
