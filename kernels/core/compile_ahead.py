"""Compiling the kernels of several calls side by side: it takes longer than running them.

The calls run once in the calling thread, in a pass that launches nothing: it notes the kernels that
Triton lacks. Child processes then compile these, each kernel once, and build the C launchers. Both
go to Triton's cache on disk, where this process and later ones find them. What no child has left
there, threads compile.

Triton's front end, which reads a kernel's Python, holds the interpreter's lock. Its passes, LLVM
and the assembler do not. So in threads the front ends go one after another.

In such a pass tensors hold whatever was in memory. So nothing may be concluded from them, counted
or kept: code that does asks `compiles_only`, or is guarded by `require_launches`.

State: the number of processes or threads, and a lock: one thread at a time collects.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Lock, local
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime import _async_compile, build, cache, driver
from triton.runtime.jit import JITCallable, JITFunction

from rl_consistency.kernels.core.child_processes import finished_in_children
from rl_consistency.kernels.core.device import INTERPRETED
from rl_consistency.kernels.core.launch import Remembered, by_type, launch_key

Report = Callable[[int, int], None]
"""Called after each kernel with (kernels compiled, kernels in all)."""

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
    """How many children or threads of this process compile from now on; for one that shares its
    cores."""
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
    are compiled, with a note that names its kernel. An interrupt ends the children, and waits for
    threads that compile.
    """
    if INTERPRETED:
        return 0
    with _turn:
        collector = _Collector()
        with collector.collecting():
            for call in calls:
                call()
        _compile(_longest_first(collector.kernels.values()), report)
    return len(collector.kernels)


class _Kernel:
    """A kernel that Triton lacks. Triton may keep this in its place, and then asks for `result`."""

    def __init__(
        self,
        key: str,
        function: JITFunction[Any],
        compiled: Callable[[], Any],
        finish: Callable[[Any], None],
    ):
        self.function = function
        self._key, self._compiled, self._finish = key, compiled, finish
        self._made: Any = None

    def on_disk(self) -> bool:
        """Whether Triton's cache holds it, as far as the names of its files say."""
        folder: Any = cache.get_cache_manager(hashlib.sha256(self._key.encode()).hexdigest())
        return folder.has_file(f"{self.function.__name__[:150]}.json")

    def make(self) -> None:
        """Compile, and build the launcher; any thread or child."""
        self._made = self._compiled()
        # Loading it is left to the first launch: launchers share a name, and threads that load them
        # at the same time may get each other's (Triton 3.6).
        active: Any = driver.active
        active.launcher_cls(self._made.src, self._made.metadata)

    def result(self, ignore_errors: bool = False) -> Any:
        """The compiled kernel, known to Triton from now on; compiles it if no thread has."""
        if self._made is None:
            self._made = self._compiled()
        self._finish(self._made)
        return self._made


class _Collector:
    """The kernels of a pass. Triton calls `submit` while this is its mode of compiling."""

    def __init__(self) -> None:
        self.kernels: dict[str, _Kernel] = {}
        self._function: Any = None

    def submit(
        self, key: str, compiled: Callable[[], Any], finish: Callable[[Any], None]
    ) -> _Kernel:
        """Note a kernel; the hash of `key` is the name of its cache entry on disk."""
        return self.kernels.setdefault(key, _Kernel(key, self._function, compiled, finish))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside the block note this thread's launches instead of running them."""
        run, launch = JITFunction.run, Remembered.launch
        seen: set[tuple[Any, ...]] = set()
        device = torch.cuda.current_device()

        def noted(kernel: Any, *args: Any, **options: Any) -> Any:
            # Another thread of the process may run a model meanwhile, and its launches are real.
            if not compiles_only():
                return run(kernel, *args, **options)
            constants = {name: x for name, x in options.items() if name not in ("grid", "warmup")}
            key = kernel, *launch_key(device, args, by_type(kernel), constants)
            if key not in seen:  # Triton takes ten times as long to say so
                seen.add(key)
                self._function = kernel
                run(kernel, *args, **(options | {"warmup": True}))

        def unremembered(kernel: Remembered, grid: Any, *args: Any, **constants: Any) -> None:
            if compiles_only():
                kernel.kernel[grid](*args, **constants)
            else:
                launch(kernel, grid, *args, **constants)

        mode = _async_compile.active_mode.set(self)  # pyright: ignore[reportArgumentType]
        _ours.collects = True
        try:
            with _bound(JITFunction, "run", noted), _bound(Remembered, "launch", unremembered):
                yield
        finally:
            _ours.collects = False
            _async_compile.active_mode.reset(mode)


def _longest_first(kernels: Collection[_Kernel]) -> list[_Kernel]:
    """The kernels, longer sources first: what begins last should take no time. One kernel of each
    function comes before all others, since a source says only roughly how long its kernels take."""
    firsts: dict[Any, _Kernel] = {}
    for kernel in kernels:
        firsts.setdefault(kernel.function, kernel)
    lengths = {function: _source_length(function) for function in firsts}
    return sorted(kernels, key=lambda k: (firsts[k.function] is not k, -lengths[k.function]))


def _source_length(function: JITFunction[Any]) -> int:
    """Characters of a function and of all that it calls by their names."""
    met = [function]
    for caller in met:
        for name in caller.fn.__code__.co_names:
            called = caller.fn.__globals__.get(name)
            if isinstance(called, JITFunction) and called not in met:
                met.append(called)
    return sum(len(each.src) for each in met)


def _compile(kernels: list[_Kernel], report: Report | None) -> None:
    """Compile all in children, the rest in threads, and hand them to Triton in this thread."""
    load, parse, parsing = build._load_module_from_path, JITCallable.parse, Lock()

    def unloaded(name: str, path: str) -> Any:
        # A module that is only built; what it launches with is never called.
        return SimpleNamespace(launch=None) if _ours.builds else load(name, path)

    def parsed(function: Any) -> Any:
        # Before 3.11.8 and 3.12.2 Python may refuse one of two that parse at a time (gh-106905).
        with parsing:
            return parse(function)

    if not kernels:
        return
    device = torch.cuda.current_device()
    left, errors = dict(enumerate(kernels)), []
    fresh = [number for number, kernel in left.items() if not kernel.on_disk()]

    def make(place: int) -> None:
        _ours.builds = True
        kernels[fresh[place]].make()

    def begin() -> None:
        torch.cuda.set_device(device)  # a thread starts on the first one
        _ours.builds = True

    with (
        _bound(build, "_load_module_from_path", unloaded),
        _bound(JITCallable, "parse", parsed),
    ):
        # A child takes about as long to start as a kernel takes to read.
        if min(_workers, len(fresh)) > 1 and not knobs.compilation.always_compile:
            for place in finished_in_children(make, len(fresh), _workers):
                left.pop(fresh[place]).result()  # read from the disk
                if report is not None:
                    report(len(kernels) - len(left), len(kernels))
        if left:
            errors = _compile_in_threads(left, begin, len(kernels), report)
    if errors:
        (name, first), names = errors[0], ", ".join(name for name, _ in errors)
        first.add_note(f"compiling {name} ahead; {len(errors)} of {len(kernels)} failed: {names}")
        raise first


def _compile_in_threads(
    left: dict[int, _Kernel], begin: Callable[[], None], count: int, report: Report | None
) -> list[tuple[str, BaseException]]:
    """The errors of those kernels that do not compile, with their names."""
    errors: list[tuple[str, BaseException]] = []
    with ThreadPoolExecutor(min(_workers, len(left)), initializer=begin) as pool:
        made: dict[Future[None], _Kernel] = {pool.submit(k.make): k for k in left.values()}
        try:
            for done, future in enumerate(as_completed(made), count - len(left) + 1):
                if (error := future.exception()) is not None:
                    errors.append((made[future].function.__name__, error))
                else:
                    made[future].result()
                if report is not None:
                    report(done, count)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return errors


@contextmanager
def _bound(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute bound to another value in the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
