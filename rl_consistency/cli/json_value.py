"""Values read from JSON, held against the types they were written from."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any, get_args, get_origin


def require_type(what: str, value: Any, kind: Any) -> None:
    """Refuse a value that is not of a type.

    Args:
        what: names the value in the error.
        value: what `json.loads` gave.
        kind: a class, a union, or `Mapping[str, ...]`. A whole number is a float too; a bool is
            no number.

    Raises:
        TypeError: it is not.
    """
    if not _fits(value, kind):
        raise TypeError(f"{what} is {shortened(value)}")


def _fits(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    if get_origin(kind) is Mapping:
        return type(value) is dict and all(_fits(item, arguments[1]) for item in value.values())
    if arguments:
        return any(_fits(value, choice) for choice in arguments)
    return type(value) is kind or (kind is float and type(value) is int)
