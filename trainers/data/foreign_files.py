"""What others wrote: JSON within bounds, and what their code says of itself in one line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_DIGITS = 4_300
"""Most digits of a number; Python turns no longer text into one."""


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    ValueError, in one line, where the text is something else, and for what Python's reader lets
    through: a repeated name, NaN, Infinity, a number out of range, half a surrogate pair.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError as error:
        raise ValueError("nested too deep to be read") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON in UTF-8: {error}") from error
    if b"\\ud" in data.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("half a surrogate pair (\\ud800 to \\udfff) is no text") from error
    return value


def parse_json_object(data: bytes) -> dict[str, Any]:
    """The object of a JSON text in UTF-8; ValueError as `parse_json`, and where it is no object."""
    if not isinstance(value := parse_json(data), dict):
        raise ValueError(f"a JSON object is needed, got {type(value).__name__}")
    return value


@contextmanager
def explained(error_type: type[ValueError], what: str) -> Iterator[None]:
    """Turn what a library raises about a file into `error_type`: `what`, and its error in one line.

    Libraries raise almost anything over a damaged file: KeyError, AssertionError, plain Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, error_type):
            raise error_type(f"{what} ({one_line(error)})") from error
        raise


def one_line(error: BaseException) -> str:
    """The type of an error and what it says, in one line."""
    return f"{type(error).__name__}: {shown(error, str)}"


def shown(value: Any, text: Callable[[Any], str] = repr) -> str:
    """The text of a value in one line, not without end, and whatever its class does."""
    try:
        line = " ".join(text(value).split())
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            return f"({text.__name__} raised {type(error).__name__})"
        raise
    return line if len(line) <= 300 else line[:297] + "..."


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = ", ".join(sorted(name for name, count in counts.items() if count > 1))
        raise ValueError(f"the field {repeated} stands more than once")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is out of range: write it as text")
    return int(text)
