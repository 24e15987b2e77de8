"""Signals that end a run: after a step, and also where others' code swallows what they raise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from rl_consistency.distributed.world import World
from rl_consistency.trainers.progress import Progress

_FAILED = 1 << 16
"""Stands for a failure among the numbers of signals."""
_ELSEWHERE = "another process ends the run; it says why"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """Raise at the end of the block what a signal's handler raised in it, swallowed or not.

    A bare `except:` swallows it, and so does Python in a `__del__`. Handlers run in the main
    thread: in any other one this does nothing.
    """
    raised: list[BaseException] = []

    def heard(handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(*given: Any) -> None:
            try:
                handler(*given)
            except BaseException as error:
                raised.append(error)
                raise

        return handle

    ours = _handlers()
    try:
        for number, handler in ours.items():
            signal.signal(number, heard(handler))
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        if raised:
            raise raised[0]


def _handlers() -> dict[signal.Signals, Callable[..., Any]]:
    """Handlers that are written in Python, by signal; only the main thread may replace them."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if main}
    return {number: handler for number, handler in handlers.items() if callable(handler)}


class Ending:
    """Signals wait in the block until the caller asks for them, at the end of a step; `speaks` says
    so, on standard error and in what `progress` tells."""

    PATIENCE = 1.0
    """Seconds in which further signals are the same wish: a launcher hands Ctrl-C on."""

    def __init__(self, progress: Progress, *, speaks: bool) -> None:
        self._progress, self._speaks = progress, speaks
        self._handlers, self._number, self._since = _handlers(), 0, 0.0
        self._failure: BaseException | None = None

    def handle(self, number: int, frame: Any) -> None:
        """Remember the first signal; let a later one end the run at once."""
        if self._number and monotonic() - self._since > self.PATIENCE:
            self._handlers[signal.Signals(number)](number, frame)
        elif not self._number:
            self._number, self._since = number, monotonic()
            if self._speaks:
                name = signal.Signals(number).name
                self._progress.notice = f"{name}: finishing and saving this step; again: end now"
                # Not print: the signal may have come in the middle of one.
                with suppress(OSError):  # a terminal that has closed
                    os.write(2, f"{self._progress.notice}\n".encode())

    def asked(self, world: World, failure: BaseException | None = None) -> int:
        """The signal that one of the processes got, the same on all; 0 for none. A failure of this
        process ends them all too."""
        self._failure = failure
        return max(world.gather("whether to end", _FAILED if failure else self._number))

    def end(self, number: int) -> None:
        """Do what the signal does to a process, or raise the failure."""
        self.__exit__()
        if self._failure is not None or number == _FAILED:
            raise self._failure or ValueError(_ELSEWHERE)
        signal.raise_signal(number)

    @staticmethod
    def raise_common(world: World, failure: BaseException | None) -> None:
        """Raise the failure of this process, or a ValueError where another one has failed."""
        if any(world.gather("what failed", failure is not None)):
            raise failure or ValueError(_ELSEWHERE)

    def __enter__(self) -> Ending:
        for number in self._handlers:
            signal.signal(number, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
