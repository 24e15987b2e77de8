"""Work in copies of this process, for what leaves its results on disk.

A child is a fork: it has all that this process has read, and no lock of an interpreter to share. It
must not use a GPU, whose driver does not survive a fork. So it collects no garbage and ends without
destructors. It ends with its parent, has none of the parent's signal handlers, and prints nothing.

Source: signal(7), fork(2), prctl(2), pidfd_open(2) and pipe(7) of Linux.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress

PATIENCE = 120.0
"""Seconds in which one of the children must finish something. A fork copies locks that other
threads held; a child that needs one waits for ever."""
MOST = 1024
"""Works of one call: their numbers fit into the smallest pipe, of 4 KiB."""
_SIZE = 4
_PR_SET_PDEATHSIG = 1


def finished_in_children(
    work: Callable[[int], object],
    count: int,
    processes: int,
    patience: float = PATIENCE,
) -> Iterator[int]:
    """The numbers below `count` for which a child has returned from `work`, as they finish.

    Numbers that never come are left to the caller: a child ends at its first error, and all end
    when the caller stops asking, when none finishes anything for `patience` seconds (with a
    warning), or where the system allows no process.
    """
    opened: list[int] = []
    children: list[int] = []

    def close(*descriptors: int) -> None:
        for descriptor in descriptors:
            opened.remove(descriptor)
            os.close(descriptor)

    try:
        try:
            for _ in range(2):
                opened += os.pipe()
        except OSError:  # no descriptor is left
            return
        queue, fill, finished, report = opened
        for number in range(min(count, MOST)):
            os.write(fill, number.to_bytes(_SIZE, "little"))
        close(fill)
        for _ in range(min(processes, count)):
            if not _add_child(children, work, queue, report, finished):
                break
        close(queue, report)
        poll = select.poll()
        poll.register(finished, select.POLLIN)
        while poll.poll(1000 * patience):
            if not (number := os.read(finished, _SIZE)):
                return
            yield int.from_bytes(number, "little")
        warnings.warn(
            f"none of {len(children)} child processes has finished anything for {patience:g} s; "
            "they are ended, and their work is done in this process",
            stacklevel=2,
        )
    finally:
        _end(children)
        close(*opened.copy())


def _add_child(
    children: list[int], work: Callable[[int], object], queue: int, report: int, unused: int
) -> bool:
    """Start a process that does work from the queue until that is empty, and add a descriptor of
    it; whether the system allows it."""
    parent = os.getpid()
    # Between the fork and the list no signal may raise: the child would be lost, or go on as a
    # second copy of the whole program.
    with _signals_later() as mask, warnings.catch_warnings():
        # Python 3.12 warns of threads, for `PATIENCE`'s reason.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            child = os.fork()
        except OSError:
            return False
        if child == 0:
            try:
                _begin(parent, mask, unused)
                while number := os.read(queue, _SIZE):
                    work(int.from_bytes(number, "little"))
                    os.write(report, number)
            finally:
                os._exit(0)
        try:
            children.append(os.pidfd_open(child))
        except OSError:
            os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            return False
        return True


def _begin(parent: int, mask: Collection[int], unused: int) -> None:
    """Let nothing that the parent has set up act in this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    os.close(unused)
    gc.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # compilers that it starts are waited for
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # Text that the parent has buffered would come twice. Errors come again, in the parent.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def _signals_later() -> Iterator[Collection[int]]:
    """Signals wait for the end of the block; gives those that this thread blocked before.

    Blocking them is for a fork's child. It is not enough here: another thread may take a signal,
    whose handler then runs in the main one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    waiting: list[int] = []
    with ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, frame: waiting.append(number))
        yield before
    for number in waiting:
        signal.raise_signal(number)


def _end(children: list[int]) -> None:
    """End processes, of which a program's own handler of SIGCHLD may have met some."""
    with _signals_later():
        for child in children:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, child, os.WEXITED)
            os.close(child)
