"""Several arrays side by side in one buffer, which one copy takes to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes an array starts on: the same alignment in every buffer


class StagedFields:
    """Where arrays lie in a buffer of bytes; fields: name -> (int64, int32 or float32; shape).

    StagedFields({"slots": (np.int64, (3,)), "lens": (np.int32, (3,))}).nbytes == 128
    """

    def __init__(self, fields: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]) -> None:
        self._places: dict[str, tuple[int, int, np.dtype[Any], tuple[int, ...]]] = {}
        self.nbytes = 0
        for name, (kind, shape) in fields.items():
            dtype = np.dtype(kind)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._places[name] = (self.nbytes, self.nbytes + size, dtype, shape)
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def on_host(self, device: torch.device) -> tuple[Tensor, dict[str, NDArray[Any]]]:
        """A fresh buffer [nbytes] uint8 to fill, pinned for a GPU, and the arrays in it.

        The caller may drop it once copies from it are queued: torch reuses it when they are done.
        """
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        memory = buffer.numpy()
        arrays = {
            name: memory[begin:end].view(dtype).reshape(shape)
            for name, (begin, end, dtype, shape) in self._places.items()
        }
        return buffer, arrays

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays as tensors, views of a buffer [nbytes] uint8 on any device."""
        return {
            name: buffer[begin:end].view(getattr(torch, dtype.name)).view(shape)
            for name, (begin, end, dtype, shape) in self._places.items()
        }


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """The arrays on a device, in one copy that does not wait for the work queued there."""
    fields = StagedFields({name: (array.dtype, array.shape) for name, array in arrays.items()})
    buffer, places = fields.on_host(device)
    for name, array in arrays.items():
        places[name][...] = array
    return fields.tensors(buffer.to(device, non_blocking=True))


def to_host(values: Tensor) -> Tensor:
    """A copy on the host that is queued, not waited for: read it after an event recorded later."""
    if values.device.type == "cpu":
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
