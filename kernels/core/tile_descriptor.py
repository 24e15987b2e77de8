"""Descriptors by which sm_90 copies tiles of a tensor, made without the checks of Triton.

A backward pass makes hundreds of descriptors, and Triton's checks take the host longer than the
launch that follows. Callers have asked `device.takes_descriptors` or its like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia import hopper
from triton.tools import tensor_descriptor

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
