"""Launchers as torch.library ops, so that a compiler sees one opaque call and keeps its order.

A launcher called by eager code and by a compiled graph is the same Python function; the registered
op only adds a schema (inferred from the type hints) and a fake implementation that gives shapes and
dtypes without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

NAMESPACE = "rl_consistency"

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


def kernel_op(
    *, fake: Callable[..., Any], mutates: Iterable[str] = ()
) -> Callable[[_Launcher], _Launcher]:
    """Register a launcher as `torch.ops.rl_consistency.<its name>`.

    Args:
        fake: the launcher's signature -> empty tensors of the results' shapes, dtypes and device;
            None for a launcher that only mutates.
        mutates: names of arguments that the launcher writes into.

    Returns:
        A decorator; the decorated name is the op, called as the launcher is.
    """

    def register(launcher: _Launcher) -> _Launcher:
        op: Any = torch.library.custom_op(
            f"{NAMESPACE}::{launcher.__name__}", launcher, mutates_args=tuple(mutates)
        )
        op.register_fake(fake)
        return op

    return register
