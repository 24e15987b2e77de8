"""Launches of a Triton kernel that remember what was compiled for the same arguments.

Triton works out the specialisation of every argument at each launch, which takes the host longer
than the launch itself. A training step launches its kernels some hundred times with the same
sizes, so a key of exact values is enough and asks for no knowledge of Triton's rules. Numbers that
a kernel does not specialise (`do_not_specialize`) may differ within one type.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core.tile_descriptor import DESCRIPTORS

ALIGNMENT = 256
"""Bytes. Addresses that differ in this respect share no compiled kernel; Triton asks for 16."""

MOST_REMEMBERED = 4096
"""Most sets of arguments per kernel. Row counts of a long run are many; then all are forgotten."""

_INT32 = range(-(2**31), 2**31)


class _Thread(threading.local):
    """What a thread keeps: the devices whose context it has met."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


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
        self._by_type = by_type(kernel)
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch, or compile and launch what is new."""
        device = torch._C._cuda_getDevice()
        if device not in _thread.devices:
            enter_context(device)
            _thread.devices.add(device)
        key = launch_key(device, arguments, self._by_type, constants)
        found = self._compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            names = self.kernel.arg_names[len(arguments) :]
            if len(self._compiled) >= MOST_REMEMBERED:
                self._compiled.clear()
            self._compiled[key] = compiled, tuple(constants[name] for name in names)
            return
        compiled, rest = found
        grid = (*grid, 1, 1)[:3]
        if _observed():
            compiled[grid](*arguments, *rest)
            return
        # What `compiled[grid]` calls too, after asking for device, stream and hooks.
        compiled.run(
            *grid, torch._C._cuda_getCurrentRawStream(device), compiled.function,
            compiled.packed_metadata, None, None, None, *arguments, *rest,
        )  # fmt: skip


def enter_context(device: int) -> None:
    """Make the current device's context the current one of this thread.

    A thread of autograd begins without a context, and Triton encodes descriptors before its
    launcher asks for one. Any call of CUDA's runtime that needs a context brings it.
    """
    torch.cuda.mem_get_info(device)


def by_type(kernel: JITFunction[Any]) -> list[bool]:
    """For each parameter, whether numbers of one type share a compiled kernel."""
    return [parameter.do_not_specialize for parameter in kernel.params]


def _observed() -> bool:
    """Whether a profiler has asked Triton to call it at launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_key(
    device: int, arguments: tuple[Any, ...], types_only: list[bool], constants: dict[str, Any]
) -> tuple[Any, ...]:
    """The device, what is compiled in, and of each argument all that Triton might look at."""
    key: list[Any] = [device, *constants, *constants.values()]
    add = key.append
    for argument, type_is_enough in zip(arguments, types_only, strict=False):
        kind = type(argument)
        if isinstance(argument, Tensor):
            add(argument.dtype)
            add(argument.data_ptr() % ALIGNMENT)
        elif kind in DESCRIPTORS:
            # Start, shape and pitches are read at the launch.
            key += (kind, argument.base.dtype, *argument.block_shape, vars(argument).get("layout"))
        elif type_is_enough:
            add(argument in _INT32 if kind is int else kind)
        else:
            add(kind)
            add(argument)
    return tuple(key)
