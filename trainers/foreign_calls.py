"""Calls of what others wrote, such as reward functions: they get no say over the process of a run.

They may take too long, leave settings of the whole process changed, or come back in a process that
they forked. All of that ends here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

STRAY = 70
"""Exit status of a forked process that came back; EX_SOFTWARE of sysexits.h."""


class TimeIsUp(BaseException):
    """The block took too long. No Exception: code that retries on those must not go on."""


class LeftChanged(Exception):
    """The block ended with a setting of the process changed; it is what it was before."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeIsUp` in the block after so many seconds; None lets it take any time.

    It is raised between two steps of Python or out of a waiting system call, and once more at the
    end of the block where it was swallowed. A library that computes without end is not interrupted.
    ValueError outside the main thread, where Python runs no handlers.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a time limit needs the main thread: set reward.timeout to null")
    raised: list[TimeIsUp] = []
    ended = False

    def end(*_: Any) -> None:
        if not ended:
            raised.append(TimeIsUp())
            raise raised[0]

    number = signal.SIGRTMAX  # judges of mathematics use SIGALRM themselves
    before = signal.signal(number, end)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), number))
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            ended = True
    finally:
        timer.cancel()
        timer.join()
        signal.signal(number, before)
    if raised:
        raise raised[0]


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """MemoryError in the block where the process would take so many bytes more than it has."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + size
    limits = [limit for limit in (before, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *limits]), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def finished(answer: Any) -> Any:
    """What a call gave; of an `async` function, what its coroutine returns or raises.

    All coroutines run on one event loop in a thread of its own: a client of a service belongs to
    the loop that first used it, and a notebook's thread runs a loop of its own already. One that is
    given up, as by `TimeIsUp`, is cancelled.
    """
    if not inspect.isawaitable(answer):
        return answer

    async def caught() -> tuple[Any, BaseException | None]:
        try:
            return await answer, None
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop, and no more
            return None, error

    running = asyncio.run_coroutine_threadsafe(caught(), _event_loop(os.getpid()))
    try:
        returned, error = running.result()
    finally:
        running.cancel()
    if error is not None:
        raise error
    return returned


@cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """The running loop of this process: a fork has no threads of the one before."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


@contextmanager
def guarded() -> Iterator[None]:
    """Keep the settings of the process, and end a process that the block forked.

    LeftChanged, naming them, where the block ended and left settings changed. Gradients are on or
    off as before, without a word.
    """
    process, before = os.getpid(), [setting.read() for setting in _SETTINGS]
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        end_a_stray(process)
        changed = []
        for setting, value in zip(_SETTINGS, before, strict=True):
            if setting.read() != value:
                changed.append(setting.name)
                setting.write(value)
    if changed:
        raise LeftChanged(f"leaves {' and '.join(changed)}: put it back before it ends")


def end_a_stray(process: int) -> None:
    """End this process at once if it is another one, forked from `process`: it would go on with
    the run, in the same directory."""
    if os.getpid() != process:
        text = f"error: process {os.getpid()}, forked by a function that process {process} called, "
        text += "came back into the run and is ended: end it inside that function by os._exit\n"
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(STRAY)


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


_guards: list[Any] = []
"""A guard's end would put back what was before it."""


def _set_inference_mode(on: bool) -> None:
    _guards.append(torch.inference_mode(on))
    _guards[-1].__enter__()


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _closed() -> list[int]:
    """Descriptors of standard input, output and error that are closed."""

    def is_closed(descriptor: int) -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return True
        return False

    return [descriptor for descriptor in range(3) if is_closed(descriptor)]


def _reopen(before: list[int]) -> None:
    """Let what was closed go nowhere: the next file that is opened would get what is printed."""
    for descriptor in _closed():
        if descriptor not in before:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)


def _streams() -> list[Any]:
    return [sys.stdin, sys.stdout, sys.stderr]


def _set_streams(streams: list[Any]) -> None:
    sys.stdin, sys.stdout, sys.stderr = streams


_SETTINGS = (
    _Setting("inference mode on", torch.is_inference_mode_enabled, _set_inference_mode),
    _Setting("another default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("another default device", torch.get_default_device, _set_device),
    _Setting("another number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("another umask", _umask, os.umask),
    _Setting("standard input or output closed", _closed, _reopen),
    _Setting("sys.stdin, stdout or stderr replaced", _streams, _set_streams),
)
