"""Launches of Triton kernels at little cost for the host: sizes, descriptors, what was compiled.

A training step makes hundreds of launches. Triton's `cdiv` and `next_power_of_2` serve kernels too,
which costs two microseconds a call. Its checks of a descriptor, and its specialisation of every
argument at each launch, take longer than the launch itself. Here a descriptor is made unchecked:
callers have asked `device.takes_descriptors` or its like. A launch is remembered by a key of exact
values, which asks for no knowledge of Triton's rules; numbers that a kernel does not specialise
(`do_not_specialize`) may differ within one type.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia import hopper
from triton.runtime.jit import JITFunction
from triton.tools import tensor_descriptor


def cdiv(x: int, y: int) -> int:
    """x / y rounded up; y is positive."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n is not negative."""
    return 1 << max(n - 1, 0).bit_length()


DESCRIPTORS = (tensor_descriptor.TensorDescriptor, hopper.TensorDescriptor)


def tile_descriptor(
    x: Tensor,
    box: Sequence[int],
    *,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """A descriptor of x for Triton, which copies one `box` (powers of two) at a time.

    `shape` and `strides`, in elements, say how x is seen; None takes those of x. The start of x and
    all strides but the last, which is 1, are multiples of 16 bytes.
    """
    made = object.__new__(tensor_descriptor.TensorDescriptor)
    made.base, made.block_shape = x, list(box)
    made.shape = list(x.shape if shape is None else shape)
    made.strides = list(x.stride() if strides is None else strides)
    return made


def gluon_descriptor(
    x: Tensor, box: Sequence[int], shape: Sequence[int], strides: Sequence[int], layout: Any
) -> Any:
    """A descriptor of x for Gluon; `layout` is the shared layout of a box."""
    made = object.__new__(hopper.TensorDescriptor)
    made.base, made.block_shape, made.layout = x, list(box), layout
    made.shape, made.strides = list(shape), list(strides)
    return made


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
