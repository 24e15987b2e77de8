"""Launchers as torch.library ops: a compiler sees one opaque call and cannot change its order.

The dispatch of such an op costs the host about ten microseconds. Where nothing observes a call and
a kernel can read its operands, the launcher is called as a plain Python function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

NAMESPACE = "rl_consistency"

PLAIN = frozenset({Tensor, nn.Parameter})
"""Tensor classes that do not intercept the ops called on them."""

_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


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


def kernel_op(
    *, fake: Callable[..., Any], mutates: tuple[str, ...] = (), name: str | None = None
) -> Callable[[_Launcher], _Launcher]:
    """A decorator that registers a launcher as `torch.ops.rl_consistency.<its name>`.

    Args:
        fake: takes the op's arguments and returns empty results of the right shapes, dtypes and
            device; returns None for a launcher that only mutates.
        mutates: names of the arguments that the launcher writes into.
        name: of the op, where it differs from the launcher's. The op then has the launcher's
            arguments but `schedule`, and calls what the launcher's module binds to the launcher's
            name: a mutant of `verify` takes its place there.
    """

    def register(launcher: _Launcher) -> _Launcher:
        run = launcher if name is None else _by_name(launcher)
        op: Any = torch.library.custom_op(
            f"{NAMESPACE}::{name or launcher.__name__}", run, mutates_args=mutates
        )
        signature = inspect.signature(run)

        def shaped(*operands: Any, **named: Any) -> Any:
            # The dispatcher leaves out an argument that has its default.
            bound = signature.bind(*operands, **named)
            bound.apply_defaults()
            return fake(*bound.args)

        op.register_fake(shaped)
        written = [list(signature.parameters).index(argument) for argument in mutates]

        @wraps(run)
        def call(*operands: Any, **named: Any) -> Any:
            if named:
                operands = signature.bind(*operands, **named).args
            if observed() or not plain(operands):
                return op(*operands)
            for index in written:
                # The op does the same: a backward pass that saved the tensor notices the change.
                increment_version(operands[index])
            return run(*operands)

        return cast("_Launcher", call)

    return register


def _by_name(launcher: Any) -> Callable[..., Any]:
    """What calls the launcher by its module's name for it, without `schedule`. The types of its
    arguments are objects, since they stand in another module than this function."""
    bound, stem = launcher.__globals__, launcher.__name__

    def run(*operands: Any) -> Any:
        return bound[stem](*operands)

    signature, types = inspect.signature(launcher), get_type_hints(launcher)
    parameters = [
        parameter.replace(annotation=types[parameter.name])
        for parameter in signature.parameters.values()
        if parameter.name != "schedule"
    ]
    own: Any = run
    own.__doc__ = launcher.__doc__
    own.__signature__ = inspect.Signature(parameters, return_annotation=types["return"])
    return own
