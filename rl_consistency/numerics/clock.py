"""A clock for work that a device does in its own time."""

from __future__ import annotations

from time import perf_counter

import torch


def finished_seconds(device: torch.device | str) -> float:
    """Seconds of `perf_counter`, read once all work launched on the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
