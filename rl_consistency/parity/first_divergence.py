"""Which part of a model is the first to differ between two ways to run the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.models.inventory import UNCALLED
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.parity.bytes import same_bytes

_BEFORE = {
    "o_proj": "attention over the keys (or rotary, or the cache)",
    "down_proj": "glu",
    "input_layernorm": "residual addition",
    "post_attention_layernorm": "residual addition",
    "norm": "residual addition",
}
"""The functional op that produces a module's input, by the last part of the module's name."""


class Activations:
    """What every leaf module that is called received and gave, in order of execution."""

    def __init__(self) -> None:
        self.rows = 0
        """Rows of the call at hand; set before each call."""
        self._values: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        self._values.setdefault(name, []).append(value.detach().reshape(self.rows, -1))

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """By name, the chosen rows out of all calls' rows one after another."""
        return {name: torch.cat(parts)[rows] for name, parts in self._values.items()}


@contextmanager
def recorded(model: nn.Module) -> Iterator[Activations]:
    """Record a patched model's activations inside the block."""
    activations = Activations()
    handles = []
    for name, module in model.named_modules():
        leaf = isinstance(module, CanonicalModule) and not list(module.children())
        if not leaf or name in UNCALLED:
            continue

        def before(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            last = name.split(".")[-1]
            if last in _BEFORE:
                activations.add(f"{name} input: {_BEFORE[last]}", args[0])

        def after(_: nn.Module, args: tuple[Any, ...], out: Tensor, name: str = name) -> None:
            activations.add(name, out)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield activations
    finally:
        for handle in handles:
            handle.remove()


def first_divergence(a: dict[str, Tensor], b: dict[str, Tensor]) -> str | None:
    """The first entry, in order of execution, whose bytes differ; None when all agree."""
    for name, expected in a.items():
        if name not in b or not same_bytes(expected, b[name]):
            return name
    return None
