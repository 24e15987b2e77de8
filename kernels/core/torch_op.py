"""Launchers as torch.library ops, so that a compiler sees one opaque call and keeps its order.

The registered op adds a schema (inferred from the type hints) and a fake implementation that gives
shapes and dtypes without data. Where nobody looks on (`recording.observed`) and a kernel can read
the operands (`recording.plain`) the launcher is called as the Python function that it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import increment_version

from rl_consistency.kernels.core.recording import observed, plain

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
        A decorator; the decorated name is called as the launcher is.
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
                # As the op does: a backward pass that saved the tensor must notice.
                increment_version(operands[index])
            return launcher(*operands)

        return cast("_Launcher", call)

    return register
