"""Autograd functions and kernels, called directly where nothing observes the call.

`torch.autograd.Function.apply` and the dispatch of a `torch.library` op cost the host about ten
microseconds each. A rollout's step or a backward pass makes hundreds of such calls and needs
neither.
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
"""Classes of tensors that change nothing about the ops they are given to."""

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})

_NOTHING = nullcontext()


def observed() -> bool:
    """Whether a compiler, a tracer, autograd, a transform or a mode has to see the calls made here.

    Forward-mode differentiation and `torch.func` count as well: they then raise their error for an
    op without a rule. Tracing before dispatch (`make_fx(..., pre_dispatch=True)`) sets a function
    mode.
    """
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def plain(operands: Iterable[Any]) -> bool:
    """Whether a kernel can read all operands: numbers, and tensors of `PLAIN` on a CPU or CUDA.

    A tensor of another class may hold its values elsewhere; a list may hold such tensors.
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
    """`torch.no_grad()`, at no cost where gradients are off already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of the same name, at no cost in a backward pass that is not recorded."""
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call


class Unrecorded:
    """A forward pass's context where no backward pass will follow: it keeps nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing is differentiable here."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""


def apply(recorded: type[torch.autograd.Function], *operands: Any) -> Any:
    """`recorded.apply(*operands)`, or its forward pass alone where nothing observes the call."""
    if observed():
        return recorded.apply(*operands)
    return recorded.forward(Unrecorded(), *operands)
