"""Who may look on while an op runs, and autograd functions called without autograd where nobody
does.

`torch.autograd.Function.apply` and the dispatch of a `torch.library` op cost the host some ten
microseconds each, and a rollout's step or a backward pass makes hundreds of such calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

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


def apply(function: type[torch.autograd.Function], *operands: Any) -> Any:
    """`function.apply(*operands)`, or its forward pass alone where nobody looks on."""
    if observed():
        return function.apply(*operands)
    return function.forward(_Unrecorded(), *operands)
