"""Signals that end a run, also where others' code swallows what their handlers raise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if main}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number, handler in ours.items():
            signal.signal(number, heard(handler))
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        if raised:
            raise raised[0]
