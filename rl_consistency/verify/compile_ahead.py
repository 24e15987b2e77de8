"""Compiling the kernels of several calls side by side: it takes longer than running them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core.device import INTERPRETED
from rl_consistency.kernels.core.remembered_launch import Remembered
from rl_consistency.verify.substitution import attribute

_threads = min(os.cpu_count() or 1, 16)


def use_threads(count: int) -> None:
    """How many threads compile in this process from now on; for one that shares its cores."""
    global _threads
    _threads = count


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Compile what the calls would launch on the current device. Nothing is launched by Triton, so
    what they compute meanwhile is meaningless.

    Kernels that are first launched from several threads may get each other's launchers (Triton 3.6:
    "function takes exactly 44 arguments (46 given)").
    """
    if INTERPRETED:
        return
    run = JITFunction.run

    def compiled(*args: Any, **options: Any) -> Any:
        return run(*args, **options | {"warmup": True})

    def unremembered(self: Remembered, grid: Any, *args: Any, **constants: Any) -> None:
        self.kernel[grid](*args, **constants)

    # A thread starts on the first device, whatever this one has chosen.
    device = (torch.cuda.current_device(),)
    with (
        attribute(JITFunction, "run", compiled),
        attribute(Remembered, "launch", unremembered),
        ThreadPoolExecutor(_threads, initializer=torch.cuda.set_device, initargs=device) as pool,
    ):
        for future in [pool.submit(call) for call in calls]:
            future.result()
