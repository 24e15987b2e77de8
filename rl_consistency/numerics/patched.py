"""An attribute of a module, a class or an object, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def replaced(
    owner: Any, name: str, value: object, *, unless: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """`owner.name` is `value` inside the block; what the owner itself held comes back on any exit.

    An attribute that the owner inherits, or does not have, is removed again. Descriptors are
    passed by: of a class the stored object is kept, of another owner its `__dict__` is written.

    Args:
        unless: asked at the end; if it says True, the value stays.
    """
    own, absent = vars(owner), object()
    before = own.get(name, absent)
    if isinstance(owner, type):  # whose __dict__ cannot be written
        put, remove = partial(setattr, owner), partial(delattr, owner)
    else:
        put, remove = own.__setitem__, own.__delitem__
    put(name, value)
    try:
        yield
    finally:
        if not unless():
            if before is not absent:
                put(name, before)
            elif name in vars(owner):
                remove(name)
