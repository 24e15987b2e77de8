"""Compiling the kernels of several calls side by side: it takes longer than running them.

The calls run once in the calling thread, in a pass that launches nothing: each launch asks Triton
for its kernel alone (`warmup`), and Triton's asynchronous mode has threads compile what is missing.
A launch that were no warm-up would wait in that mode for its kernel. Then the C launchers are
built. Both lie in Triton's cache on disk, where later processes find them.

Triton's front end, which reads a kernel's Python, holds the interpreter's lock. Its passes, LLVM
and the assembler do not.

In such a pass tensors hold whatever was in memory. So nothing may be concluded from them, counted
or kept: code that does asks `compiles_only`, or is guarded by `require_launches`.

State: the number of threads, and a lock: one thread at a time has Triton changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import copy_context
from threading import Lock, local
from types import SimpleNamespace
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core.device import INTERPRETED
from rl_consistency.kernels.core.launch import Remembered, by_type, launch_key

Report = Callable[[int, int], None]
"""Called after each kernel with (kernels compiled, kernels in all)."""

_PARSES_SIDE_BY_SIDE = sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12)
"""Before these versions Python may refuse one of two sources that are parsed at a time
(gh-106905)."""

_workers = min(len(os.sched_getaffinity(0)), 16)
_turn = Lock()


class _Ours(local):
    """What this thread is doing."""

    # Defaults of the class: every product asks, and an attribute that is missing costs ten times
    # one that is there.
    collects = False
    builds = False


_ours = _Ours()


def use_workers(count: int) -> None:
    """How many threads of this process compile from now on; for one that shares its cores."""
    global _workers
    _workers = count


def compiles_only() -> bool:
    """Whether this thread is in a pass that launches nothing, so that results are meaningless."""
    return _ours.collects


def require_launches(what: str) -> None:
    """RuntimeError in a pass that launches nothing: `what` would rest on meaningless results."""
    if compiles_only():
        raise RuntimeError(f"{what} was asked for while kernels compile ahead; nothing is computed")


def compile_ahead(calls: Iterable[Callable[[], object]], report: Report | None = None) -> int:
    """Compile what the calls would launch on the current device; returns the number of kernels.

    No kernel of Triton is launched, so what the calls compute is meaningless; torch's own kernels
    and other threads' launch as ever. No value that a kernel would have made may be an index.
    An error of a call passes through. An error of the compiler is raised when all other kernels
    are compiled, with a note of how many failed. An interrupt waits for the threads.
    """
    if INTERPRETED:
        return 0
    # In a copy of the context: Triton's mode stays set there after an error.
    return copy_context().run(_compile, calls, report)


def _compile(calls: Iterable[Callable[[], object]], report: Report | None) -> int:
    device = torch.cuda.current_device()

    def begin() -> None:
        torch.cuda.set_device(device)  # a thread starts on the first one
        _ours.builds = True

    workers = _workers if _PARSES_SIDE_BY_SIDE else 1
    with (
        _turn,
        _bound(build, "_load_module_from_path", _unloaded(build._load_module_from_path)),
        ThreadPoolExecutor(workers, initializer=begin) as pool,
    ):
        with AsyncCompileMode(pool, ignore_errors=True) as mode:
            with _nothing_launched(device):
                for call in calls:
                    call()
            compiled = mode.raw_futures
            for done, _ in enumerate(as_completed(compiled), 1):
                if report is not None:
                    report(done, len(compiled))
        errors = [error for future in compiled if (error := future.exception()) is not None]
        if errors:
            errors[0].add_note(f"{len(errors)} of {len(compiled)} kernels did not compile ahead")
            raise errors[0]
        active: Any = driver.active
        for built in [
            pool.submit(active.launcher_cls, kernel.src, kernel.metadata)
            for kernel in (future.result() for future in compiled)
        ]:
            built.result()
    return len(compiled)


def _unloaded(load: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """A loader of C launchers that loads none in the threads that build them: launchers share a
    name, and threads that load them at the same time may get each other's (Triton 3.6)."""

    def loaded(name: str, path: str) -> Any:
        return SimpleNamespace(launch=None) if _ours.builds else load(name, path)

    return loaded


@contextmanager
def _nothing_launched(device: int) -> Iterator[None]:
    """Inside the block this thread's launches ask for their kernels alone."""
    run, launch = JITFunction.run, Remembered.launch
    seen: set[tuple[Any, ...]] = set()

    def warmed(kernel: Any, *args: Any, **options: Any) -> Any:
        # Another thread of the process may run a model meanwhile, and its launches are real.
        if not compiles_only():
            return run(kernel, *args, **options)
        constants = {name: x for name, x in options.items() if name not in ("grid", "warmup")}
        key = kernel, *launch_key(device, args, by_type(kernel), constants)
        if key not in seen:  # Triton takes ten times as long to say so
            seen.add(key)
            run(kernel, *args, **(options | {"warmup": True}))

    def unremembered(kernel: Remembered, grid: Any, *args: Any, **constants: Any) -> None:
        if compiles_only():
            kernel.kernel[grid](*args, **constants)
        else:
            launch(kernel, grid, *args, **constants)

    _ours.collects = True
    try:
        with _bound(JITFunction, "run", warmed), _bound(Remembered, "launch", unremembered):
            yield
    finally:
        _ours.collects = False


@contextmanager
def _bound(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute bound to another value in the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
