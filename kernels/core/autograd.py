"""Autograd functions and kernels, called directly where nothing observes the call.

`torch.autograd.Function.apply` and the dispatch of a `torch.library` op each cost the host about
ten microseconds. A rollout step or a backward pass makes hundreds of such calls and needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, function

PLAIN = frozenset({Tensor, nn.Parameter})
"""Tensor classes that do not intercept the ops called on them."""

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})

_NOTHING = nullcontext()


def observed() -> bool:
    """Whether a compiler, a tracer, autograd, a transform or a mode has to see a call made now.

    Forward-mode differentiation and `torch.func` count too: they raise an error for an op without a
    rule. `make_fx(..., pre_dispatch=True)` shows as the function mode it sets.
    """
    return torch.is_grad_enabled() or watched()


def watched() -> bool:
    """`observed`, by anything but autograd."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def plain(operands: Iterable[Any]) -> bool:
    """Whether a kernel can read all operands: constants, and tensors of `PLAIN` on a CPU or CUDA.

    A tensor of another class may keep its values elsewhere, and a list may contain such tensors.
    """
    for operand in operands:
        kind = type(operand)
        if kind in PLAIN:
            if not (operand.is_cuda or operand.is_cpu):
                return False
        elif kind not in _VALUES:
            return False
    return True


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
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing is differentiable here."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""


def apply(recorded: type[torch.autograd.Function], *operands: Any) -> Any:
    """`recorded.apply(*operands)`; only its forward pass where nothing observes the call."""
    if observed():
        return recorded.apply(*operands)
    return recorded.forward(Unrecorded(), *operands)
