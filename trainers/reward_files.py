"""Reward functions that a recipe names by their file."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

FILE = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")
"""The name of a function in a file."""


def module_name(name: str) -> str:
    """The module that a function's name in a recipe says; of a file the one it is loaded as."""
    if found := FILE.fullmatch(name):
        return "reward_file_" + re.sub(r"\W", "_", found["file"])
    return name.partition(":")[0]


def load_file(name: str, folders: Sequence[Path]) -> ModuleType:
    """Run the file of the function `name`, the first one there is in `folders`, as a module.

    Its own folder comes last on Python's path, so that it may import what lies beside it.
    ImportError, with the places looked at, where there is no such file.
    """
    found = FILE.fullmatch(name)
    assert found is not None
    places = [(folder / Path(found["file"]).expanduser()).absolute() for folder in folders]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ImportError(f"there is no file {' or '.join(map(str, dict.fromkeys(places)))}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(module_name(name), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name(name)] = module  # where dataclasses and pickles look for it
    spec.loader.exec_module(module)
    return module
