"""Facts that decide which schedule runs: the GPU's, and how operands lie in its memory.

State: this module reads a device's facts once per process and caches them.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's CPU interpreter. It runs pointer schedules only, to test their
logic; its bits are not a GPU's."""

MIN_CAPABILITY = (8, 0)
"""bf16 matrix units begin with Ampere."""

DESCRIPTOR_BYTES = 16
"""The address and the row pitches that a tile descriptor takes are multiples of this."""


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 2 in the interpreter."""
    return 2 if INTERPRETED else _properties(device.index).multi_processor_count


def has_tma(device: torch.device) -> bool:
    """Whether the device copies tiles by descriptor (sm_90 and later)."""
    return not INTERPRETED and capability(device) >= (9, 0)


def has_wgmma(device: torch.device) -> bool:
    """Whether the device has warp-group matrix instructions (only sm_90)."""
    return not INTERPRETED and capability(device) == (9, 0)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, such as (9, 0)."""
    found = _properties(device.index)
    return found.major, found.minor


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; those of sm_90 in the interpreter."""
    if INTERPRETED:
        return 227 << 10
    return _properties(device.index).shared_memory_per_block_optin


def takes_descriptors(*tensors: Tensor) -> bool:
    """Whether tile descriptors can address the tensors, on a device that `has_tma`.

    They can if the last dimension is dense, rows do not overlap, and the start and all other
    strides are multiples of `DESCRIPTOR_BYTES`.
    """
    for tensor in tensors:
        strides = tensor.stride()
        if strides[-1] != 1 or tensor.data_ptr() % DESCRIPTOR_BYTES:
            return False
        width, itemsize = tensor.shape[-1], tensor.itemsize
        for pitch in strides[:-1]:
            if pitch < width or pitch * itemsize % DESCRIPTOR_BYTES:
                return False
    return True


def dense_rows(tensor: Tensor) -> Tensor:
    """`tensor` itself if its last dimension is dense, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@cache
def _properties(index: int | None) -> Any:
    return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
