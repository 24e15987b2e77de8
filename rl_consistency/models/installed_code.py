"""Which code is that of an installed library: its file compiles to it, whatever it is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


def written_in(function: Any) -> str:
    """The module in whose installed file a plain function is written, as it runs now; empty for all
    else: other code in that module's namespace, a module of that name without a file of it."""
    if type(function) is not FunctionType:
        return ""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    own = module is not None and vars(module) is function.__globals__
    return name if own and function.__code__ in _codes(name) else ""


def homes(call: Callable[..., Any]) -> set[str]:
    """`written_in` of a callable and of every callable that it is bound to or closes over, modules
    and classes excepted."""
    found, seen, left = set[str](), set[int](), [call]
    while left:
        each: Any = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) is partial:
            around = [each.func, *each.args, *each.keywords.values()]
        else:
            if not isinstance(each, FunctionType):  # a method, or an object that can be called
                each = each.__func__ if type(each) is MethodType else type(each).__call__
            found.add(written_in(each))
            around = _cells(each)
        left += [o for o in around if callable(o) and not isinstance(o, (nn.Module, type))]
    return found


def _cells(function: Any) -> list[Any]:
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet set
            continue
    return found


@cache
def _codes(name: str) -> frozenset[CodeType]:
    """All that the installed file of a module compiles to; nothing where there is no such file."""
    top, *parts = name.split(".")
    spec = PathFinder.find_spec(top)
    found, left = set[CodeType](), list[CodeType]()
    for root in (spec and spec.submodule_search_locations) or ():
        path = Path(root, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                left.append(compile(file.read_bytes(), file, "exec", dont_inherit=True))
    while left:
        code = left.pop()
        found.add(code)
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(found)
