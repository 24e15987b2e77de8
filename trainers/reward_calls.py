"""What reward functions are called with: the names of their arguments, lists or one completion."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

ARGUMENTS = {
    "ours": frozenset({"prompts", "completions", "answers"}),
    "trl": frozenset({"prompts", "completions", "completion_ids"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
}
"""Signature -> the lists that every function of that signature is given. One of ours is given
`completion_ids` too, where it names them or takes any argument."""


OF_ONE = {"prompts": "prompt", "completions": "completion", "answers": "answer"}
"""Arguments of a function of lists, and their names in one that is called with one completion."""


def named_arguments(names: Collection[str], function: Callable[..., Any]) -> frozenset[str]:
    """Those of `names` that a function has as arguments; all where it takes any."""
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        return frozenset(names)  # written in C
    if any(p.kind is p.VAR_KEYWORD for p in found.values()):
        return frozenset(names)
    return frozenset(names) & found.keys()


def of_verl(one: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of verl's compute_score for one completion."""
    fields = {name: one.get(name) for name in ("data_source", "extra_info")}
    return {**fields, "solution_str": one["completions"], "ground_truth": one["answers"]}


def score_of(value: Any) -> Any:
    return value["score"] if isinstance(value, dict) and "score" in value else value


async def all_scores(values: Sequence[Any]) -> list[Any]:
    """Those that are awaitable awaited, side by side."""
    return [score_of(value) for value in await asyncio.gather(*map(_awaited, values))]


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function has an argument `completion` and none `completions`."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "completion" in found and "completions" not in found


def takes_ids(function: Callable[..., Any]) -> bool:
    """Whether a function has an argument `completion_ids`, or takes any."""
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        return False  # written in C
    return "completion_ids" in found or any(p.kind is p.VAR_KEYWORD for p in found.values())


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of the source of a function, or of an object's class; of its compiled code where its
    source cannot be read. What it calls and holds does not enter."""
    plain: Any = inspect.unwrap(function)
    while isinstance(plain, partial):
        plain = inspect.unwrap(plain.func)
    plain = plain if hasattr(plain, "__code__") or isinstance(plain, type) else type(plain)
    try:
        text = inspect.getsource(plain)
    except (OSError, TypeError):
        text = _as_text(getattr(plain, "__code__", plain))
    return hashlib.sha256(text.encode()).hexdigest()


def _as_text(value: Any) -> str:
    """Code or one of its constants, without addresses and the order of a set."""
    if isinstance(value, CodeType):
        return repr((value.co_code, value.co_names, [_as_text(each) for each in value.co_consts]))
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
