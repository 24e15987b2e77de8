"""Imports without a search for garbage, which takes a third of a short command's time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """The first imports of a process: no collection looks at what they make, then or later."""
    if "torch" in sys.modules or not gc.isenabled():
        yield  # what else is in memory by now may be garbage one day
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
