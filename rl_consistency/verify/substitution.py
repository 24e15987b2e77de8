"""Replace a function or constant of this package everywhere it is bound, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rl_consistency.numerics.patched import replaced

PACKAGE = "rl_consistency."
MUTANTS = "rl_consistency.verify.mutants."
"""Prefix of the mutants' modules, which keep the right functions to build the wrong ones from."""

attribute = replaced
"""`with attribute(owner, name, replacement)`: one attribute of a module or class, for a while."""


@contextmanager
def substituted(*given: Any) -> Iterator[None]:
    """Bind each replacement in every loaded module of the package, but the mutants, that binds its
    original; put all back on any exit. `given` are original, replacement, original, ... That
    nothing binds an original is a ValueError."""
    with ExitStack() as stack:
        for original, replacement in zip(given[::2], given[1::2], strict=True):
            bindings = [
                (module, name)
                for path, module in list(sys.modules.items())
                if path.startswith(PACKAGE) and not path.startswith(MUTANTS)
                for name, value in list(vars(module).items())
                if value is original
            ]
            if not bindings:
                raise ValueError(f"nothing to substitute: no module binds {original!r}.")
            for module, name in bindings:
                stack.enter_context(attribute(module, name, replacement))
        yield
