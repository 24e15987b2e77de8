"""Who may look on while an op runs, and autograd functions called without autograd where nobody
does.

`torch.autograd.Function.apply` and the dispatch of a `torch.library` op cost the host some ten
microseconds each, and a rollout's step or a backward pass makes hundreds of such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, function

PLAIN = frozenset({Tensor, nn.Parameter})
"""Classes of tensors that have no say in what is done with them."""

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})


def observed() -> bool:
    """Whether a compiler, a tracer, autograd, a transform or a mode is to see what is called here.

    Forward-mode differentiation and `torch.func` thereby meet the error of an op that has no rule
    for them. Tracing before dispatch (`make_fx(..., pre_dispatch=True)`) has a function mode.
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


_NOTHING = nullcontext()


def unrecorded() -> AbstractContextManager[Any]:
    """A block without autograd: inside a function's passes there is none to switch off."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of the same name, at no cost in a backward pass that is not recorded."""
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call


def plain(operands: Iterable[Any]) -> bool:
    """Whether a kernel can read the operands: numbers, and tensors of `PLAIN` on a CPU or CUDA.

    A tensor of another class may hold its values elsewhere, a list such tensors.
    """
    for operand in operands:
        kind = type(operand)
        if kind in PLAIN:
            if not (operand.is_cuda or operand.is_cpu):
                return False
        elif kind not in _VALUES:
            return False
    return True


class _Unrecorded:
    """In place of autograd's context: forward writes to it what no backward pass will read."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Nothing is differentiable here."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""


def apply(recorded: type[torch.autograd.Function], *operands: Any) -> Any:
    """`recorded.apply(*operands)`, or its forward pass alone where nobody looks on."""
    if observed():
        return recorded.apply(*operands)
    return recorded.forward(_Unrecorded(), *operands)


class Part(_Unrecorded):
    """In place of autograd's context for an op that runs inside a function of several.

    Between the passes it holds no tensor: `keep` hands them to autograd, `in_reverse` gives them
    back.
    """

    needs_input_grad: tuple[bool, ...] = ()
    """For the function of several to set before it calls the op's backward pass."""
    saved_tensors: tuple[Any, ...] = ()
    count = 0
    """Tensors that the op saved."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Hold them until `keep`."""
        self.saved_tensors = tensors


def keep(ctx: Any, parts: list[Part]) -> None:
    """End of a forward pass: autograd saves what the parts did, in their order."""
    ctx.save_for_backward(*[tensor for part in parts for tensor in part.saved_tensors])
    for part in parts:
        part.count, part.saved_tensors = len(part.saved_tensors), ()
    ctx.parts = parts


def in_reverse(ctx: Any) -> Iterator[Part]:
    """In a backward pass: the parts, last one first, each with its tensors until the next one is
    asked for.

    So a tensor that autograd saved as it is lives no longer than it would for a function of the
    part alone. One that a hook makes on unpacking (`save_on_cpu`, a checkpoint) does: those of all
    parts are made at the start, one for every part that saved the tensor, and all are looked at for
    changes in place, those of parts that get no gradient as well.
    """
    saved = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    for part in reversed(ctx.parts):
        first = len(saved) - part.count
        part.saved_tensors = tuple(saved[first:])
        del saved[first:]
        try:
            yield part
        finally:
            part.saved_tensors = ()
