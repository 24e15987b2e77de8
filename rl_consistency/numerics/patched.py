"""An attribute of a module, a class or an object, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


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
    before = vars(owner).get(name, _MISSING)
    _put(owner, name, value)
    try:
        yield
    finally:
        if not unless():
            _put(owner, name, before)


def _put(owner: Any, name: str, value: object) -> None:
    own = vars(owner)
    if isinstance(owner, type):  # whose __dict__ cannot be written
        if value is not _MISSING:
            setattr(owner, name, value)
        elif name in own:
            delattr(owner, name)
    elif value is not _MISSING:
        own[name] = value
    else:
        own.pop(name, None)
