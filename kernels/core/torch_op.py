"""Launchers as torch.library ops: a compiler sees one opaque call and keeps its order.

The registered op adds a schema (inferred from the type hints) and a fake implementation that gives
shapes and dtypes without data. Where nothing observes the call and a kernel can read the operands
(`autograd.observed`, `autograd.plain`), the launcher is called as a plain Python function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import increment_version

from rl_consistency.kernels.core.autograd import observed, plain

NAMESPACE = "rl_consistency"

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


def kernel_op(
    *, fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[_Launcher], _Launcher]:
    """Register a launcher as `torch.ops.rl_consistency.<its name>`.

    Args:
        fake: the launcher's signature -> empty tensors of the results' shapes, dtypes and device;
            None for a launcher that only mutates.
        mutates: names of arguments that the launcher writes into.

    Returns:
        A decorator; the decorated function has the signature of the launcher.
    """

    def register(launcher: _Launcher) -> _Launcher:
        op: Any = torch.library.custom_op(
            f"{NAMESPACE}::{launcher.__name__}", launcher, mutates_args=mutates
        )
        op.register_fake(fake)
        names = list(inspect.signature(launcher).parameters)
        written = [names.index(name) for name in mutates]

        @wraps(launcher)
        def call(*operands: Any, **named: Any) -> Any:
            if named or observed() or not plain(operands):
                return op(*operands, **named)
            for index in written:
                # As the op does: a backward pass that saved the tensor has to notice the change.
                increment_version(operands[index])
            return launcher(*operands)

        return cast("_Launcher", call)

    return register
