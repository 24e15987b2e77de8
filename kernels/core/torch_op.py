"""Launchers as torch.library ops: a compiler sees one opaque call and cannot change its order.

Where nothing observes a call and a kernel can read its operands (`autograd.observed`,
`autograd.plain`), the launcher is called as a plain Python function.
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
    """A decorator that registers a launcher as `torch.ops.rl_consistency.<its name>`.

    Args:
        fake: takes the launcher's arguments and returns empty results of the right shapes, dtypes
            and device; returns None for a launcher that only mutates.
        mutates: names of the arguments that the launcher writes into.
    """

    def register(launcher: _Launcher) -> _Launcher:
        op: Any = torch.library.custom_op(
            f"{NAMESPACE}::{launcher.__name__}", launcher, mutates_args=mutates
        )
        op.register_fake(fake)
        signature = inspect.signature(launcher)
        written = [list(signature.parameters).index(name) for name in mutates]

        @wraps(launcher)
        def call(*operands: Any, **named: Any) -> Any:
            if named:
                operands = signature.bind(*operands, **named).args
            if observed() or not plain(operands):
                return op(*operands)
            for index in written:
                # The op does the same: a backward pass that saved the tensor notices the change.
                increment_version(operands[index])
            return launcher(*operands)

        return cast("_Launcher", call)

    return register
