"""A limit to the time that others' code may take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNAL = signal.SIGRTMAX
"""Judges of mathematics use SIGALRM themselves."""


class TimeIsUp(BaseException):
    """The block took too long. No Exception: code that retries on those must not go on."""


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

    before = signal.signal(_SIGNAL, end)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), _SIGNAL))
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
        signal.signal(_SIGNAL, before)
    if raised:
        raise raised[0]
