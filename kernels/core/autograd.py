"""Autograd functions, called directly where nothing observes the call.

`torch.autograd.Function.apply` costs the host about ten microseconds. A rollout step or a backward
pass makes hundreds of such calls and does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.autograd import function

from rl_consistency.kernels.core.torch_op import observed

_NOTHING = nullcontext()


def unrecorded() -> AbstractContextManager[Any]:
    """`torch.no_grad()`; free where gradients are off already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_at_errors: list[Callable[[], None]] = []


def at_backward_errors(tell: Callable[[], None]) -> None:
    """Have `tell` called whenever a backward function of ours raises, before its caller knows.

    A device has a thread of autograd's, which drops a failed pass at some time after `backward()`
    has raised in the caller's thread. What the caller does then must not come first.
    """
    _at_errors.append(tell)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of this name; free in a backward pass that autograd does not record."""
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        run = guarded if torch.is_grad_enabled() else backward
        if torch.compiler.is_compiling():
            return run(ctx, *gradients)
        try:
            return run(ctx, *gradients)
        except BaseException:
            for tell in _at_errors:
                tell()
            raise

    return call


class Unrecorded:
    """The context of a forward pass that no backward pass follows: it keeps nothing."""

    def save_for_backward(self, *_: Any) -> None: ...

    mark_non_differentiable = set_materialize_grads = save_for_backward


def apply(recorded: type[torch.autograd.Function], *operands: Any) -> Any:
    """`recorded.apply(*operands)`; only its forward pass where nothing observes the call."""
    if observed():
        return recorded.apply(*operands)
    return recorded.forward(Unrecorded(), *operands)
