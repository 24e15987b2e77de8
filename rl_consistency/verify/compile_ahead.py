"""Compiling the kernels of several calls side by side: it takes longer than running them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import local
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
    """Compile what the calls would launch on the current device. Triton launches nothing of them,
    so what they compute is meaningless; other threads launch as ever.

    Kernels that are first launched from several threads may get each other's launchers (Triton 3.6:
    "function takes exactly 44 arguments (46 given)").
    """
    if INTERPRETED:
        return
    run, ours = JITFunction.run, local()
    # A thread starts on the first device, whatever this one has chosen.
    device = torch.cuda.current_device()

    def begin() -> None:
        torch.cuda.set_device(device)
        ours.compiles = True

    def compiled(*args: Any, **options: Any) -> Any:
        # Another thread of the process may run a model meanwhile, and its launches are real.
        compiles = getattr(ours, "compiles", False)
        return run(*args, **(options | {"warmup": True} if compiles else options))

    launch = Remembered.launch

    def compiled_too(self: Remembered, grid: Any, *args: Any, **constants: Any) -> None:
        if getattr(ours, "compiles", False):
            self.kernel[grid](*args, **constants)
        else:
            launch(self, grid, *args, **constants)

    with (
        attribute(JITFunction, "run", compiled),
        attribute(Remembered, "launch", compiled_too),
        ThreadPoolExecutor(_threads, initializer=begin) as pool,
    ):
        for future in [pool.submit(call) for call in calls]:
            future.result()
