"""A command in a process of its own, watched by its parent: what ends it without a word is seen.

`os._exit(0)` in a reward function, the exit of a C library and `exec` end a process with status 0
and run no line of Python after it. So the process says at its end that it has come there.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

UNFINISHED = 2
"""Exit status of a command whose process ended without a word."""
PARENT_DIES = 1
"""PR_SET_PDEATHSIG of prctl."""
WATCHED = (
    *(signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


@contextmanager
def watched() -> Iterator[None]:
    """The block runs in a new process. Its parent hands signals on, ends as the process does, and
    never comes here; where the block was not left, it says so and ends with a status above 0."""
    reads, writes = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    parent = os.getpid()
    if child := os.fork():
        os.close(writes)
        _watch(child, reads)
    ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(UNFINISHED)  # the parent is gone already
    os.close(reads)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            with suppress(OSError):  # something has closed it: then the parent says so
                os.write(writes, b"ended")


def _watch(child: int, reads: int) -> NoReturn:
    while True:
        found = signal.sigwaitinfo(WATCHED)
        if found.si_signo != signal.SIGCHLD:
            # A terminal's own signals (SI_KERNEL) go to the child as well.
            if found.si_code <= 0:
                os.kill(child, found.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.set_blocking(reads, False)
    said = b""
    with suppress(BlockingIOError):  # a process that it forked lives on
        said = os.read(reads, 100)
    code = os.waitstatus_to_exitcode(status)
    if not said:
        with suppress(OSError):
            print(
                f"error: the process of this command ended with status {code} before its end: "
                "something that it called (a reward function, say) ended it, by os._exit, exec or "
                "a C library's exit. Mend that, and continue with --resume.",
                file=sys.stderr,
                flush=True,
            )
        code = UNFINISHED
    os._exit(code)
