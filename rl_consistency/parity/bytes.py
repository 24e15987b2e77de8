"""Tensors compared byte by byte: zeros of both signs differ, and a NaN equals the same NaN."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: Tensor) -> Tensor:
    """The values' own bytes as integers, same shape."""
    return values.detach().contiguous().view(_INTEGERS[values.element_size()])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device have the same dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
