"""The global random states of Python, numpy and torch, for checkpoints.

Torch's GPU state is kept only where a GPU is in use. Our sampling and data order are counter-based
and need none of these states; the reward functions of others may draw from any of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture() -> dict[str, Any]:
    """The states as plain values that survive JSON."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Set the states to what `capture` gave."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_state(state["torch"]))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(_state(state["cuda"]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all of them inside the block; their states from before come back at its end."""
    before = capture()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        restore(before)


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _state(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
