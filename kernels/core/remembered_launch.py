"""Launches of a Triton kernel that remember what was compiled for the same arguments.

Triton works out the specialisation of every argument at each launch, which takes the host longer
than the launch itself. A training step launches the small kernels some hundred times with the same
sizes, so a key of exact values is enough and asks for no knowledge of Triton's rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

ALIGNMENT = 256
"""Bytes. Addresses that differ in this respect share no compiled kernel; Triton asks for 16."""

MOST_REMEMBERED = 4096
"""Sets of arguments per kernel. Row counts of a long run are many; then all are forgotten."""


def remembered(kernel: Any) -> Any:
    """The kernel, launched in the same way: `kernel[grid](*arguments, **constants)`.

    Arguments are tensors, numbers or None, and constants come by name. The interpreter's kernels
    stay as they are.
    """
    return _Remembered(kernel) if isinstance(kernel, JITFunction) else kernel


class _Remembered:
    def __init__(self, kernel: JITFunction[Any]):
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key = _key(arguments, constants)
        found = self._compiled.get(key)
        if found is None:
            compiled = self._kernel[grid](*arguments, **constants)
            names = self._kernel.arg_names[len(arguments) :]
            if len(self._compiled) >= MOST_REMEMBERED:
                self._compiled.clear()
            self._compiled[key] = compiled, tuple(constants[name] for name in names)
            return
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def _key(arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """The device, what is compiled in, and of each argument all that Triton might look at."""
    key: list[Any] = [torch._C._cuda_getDevice(), *constants, *constants.values()]
    for argument in arguments:
        if isinstance(argument, Tensor):
            key += (argument.dtype, argument.data_ptr() % ALIGNMENT)
        else:
            key += (type(argument), argument)
    return tuple(key)
