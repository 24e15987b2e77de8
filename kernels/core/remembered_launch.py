"""Launches of a Triton kernel that remember what was compiled for the same arguments.

Triton works out the specialisation of every argument at each launch, which takes the host longer
than the launch itself. A training step launches its kernels some hundred times with the same
sizes, so a key of exact values is enough and asks for no knowledge of Triton's rules. Numbers that
a kernel does not specialise (`do_not_specialize`) may differ within one type.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core.tile_descriptor import DESCRIPTORS

ALIGNMENT = 256
"""Bytes. Addresses that differ in this respect share no compiled kernel; Triton asks for 16."""

MOST_REMEMBERED = 4096
"""Sets of arguments per kernel. Row counts of a long run are many; then all are forgotten."""

_INT32 = range(-(2**31), 2**31)


def remembered(kernel: Any) -> Any:
    """The kernel, launched in the same way: `kernel[grid](*arguments, **constants)`.

    Arguments are tensors, descriptors, numbers or None, and constants come by name. The
    interpreter's kernels stay as they are.
    """
    return Remembered(kernel) if isinstance(kernel, JITFunction) else kernel


class Remembered:
    """A kernel with what was compiled for it, by arguments."""

    def __init__(self, kernel: JITFunction[Any]):
        self.kernel = kernel
        self._by_type = [parameter.do_not_specialize for parameter in kernel.params]
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch, or compile and launch what is new."""
        key = _key(arguments, self._by_type, constants)
        found = self._compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            names = self.kernel.arg_names[len(arguments) :]
            if len(self._compiled) >= MOST_REMEMBERED:
                self._compiled.clear()
            self._compiled[key] = compiled, tuple(constants[name] for name in names)
            return
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def _key(
    arguments: tuple[Any, ...], by_type: list[bool], constants: dict[str, Any]
) -> tuple[Any, ...]:
    """The device, what is compiled in, and of each argument all that Triton might look at."""
    key: list[Any] = [torch._C._cuda_getDevice(), *constants, *constants.values()]
    for argument, type_is_enough in zip(arguments, by_type, strict=False):
        kind = type(argument)
        if isinstance(argument, Tensor):
            key += (argument.dtype, argument.data_ptr() % ALIGNMENT)
        elif kind in DESCRIPTORS:
            # Start, shape and pitches are read at the launch.
            key += (kind, argument.base.dtype, *argument.block_shape, vars(argument).get("layout"))
        elif type_is_enough:
            key.append(argument in _INT32 if kind is int else kind)
        else:
            key += (kind, argument)
    return tuple(key)
