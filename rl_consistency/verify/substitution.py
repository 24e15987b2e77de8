"""Replace one function or constant of this package everywhere it is bound, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

PACKAGE = "rl_consistency."
MUTANTS = "rl_consistency.verify.mutants."
"""Their modules keep the right functions, to build the wrong ones from."""


@contextmanager
def substituted(original: Any, replacement: Any) -> Iterator[None]:
    """Bind `replacement` wherever a loaded module of the package, but for the mutants, binds
    `original`.

    Modules import functions by name, so one function has several bindings; all of them change, and
    all come back on any exit. For negative controls only.

    Raises:
        ValueError: nothing in the package binds it.
    """
    bindings = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.startswith(PACKAGE) and not path.startswith(MUTANTS)
        for name, value in list(vars(module).items())
        if value is original
    ]
    if not bindings:
        raise ValueError(f"no module of {PACKAGE[:-1]} binds {original!r}; nothing to substitute.")
    try:
        for module, name in bindings:
            setattr(module, name, replacement)
        yield
    finally:
        for module, name in bindings:
            setattr(module, name, original)


@contextmanager
def attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Set one attribute of a module or class inside the block."""
    # The descriptor itself: a class method read through getattr would come back bound.
    original = getattr_static(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
