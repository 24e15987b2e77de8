"""Replace a function or constant of this package everywhere it is bound, for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import getattr_static
from typing import Any

PACKAGE = "rl_consistency."
MUTANTS = "rl_consistency.verify.mutants."
"""Their modules keep the right functions, to build the wrong ones from."""

Perturbation = Callable[[], AbstractContextManager[None]]


@contextmanager
def substituted(original: Any, replacement: Any) -> Iterator[None]:
    """Bind `replacement` in every loaded module of the package, but the mutants, that binds
    `original`; put it back on any exit.

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


def perturbation(bind: Callable[..., Any], *place: Any) -> Callable[[Any], Perturbation]:
    """Makes a perturbation of a wrong function: `bind(*place, wrong)` puts it in its place.

    The function's docstring says what is wrong.
    """

    def decorate(wrong: Callable[..., Any]) -> Perturbation:
        def perturb() -> AbstractContextManager[None]:
            return bind(*place, wrong)

        perturb.__doc__ = wrong.__doc__
        return perturb

    return decorate
