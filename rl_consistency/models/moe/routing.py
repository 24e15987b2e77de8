"""What the rows of a forward pass were routed to, for whoever asked to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Routed(NamedTuple):
    """The routing of one layer."""

    logits: Tensor
    """[R, E], differentiable; fp32 but on the stock path."""
    expert_ids: Tensor
    """[R, k], ascending in each row but on the stock path."""


@dataclass(eq=False)
class RoutingRecord:
    """The routing of a forward pass: of all sparse layers, in their order."""

    layers: list[Routed] = field(default_factory=list)

    def fingerprints(self) -> Tensor:
        """[R] int64 on the device: one number for the experts that a row met in all layers.

        Two rows with other experts have other numbers, up to a chance of about 2^-64. RuntimeError
        without a sparse layer.
        """
        ids = [layer.expert_ids.sort(dim=1).values.long() for layer in self.layers]
        return expert_fingerprints(torch.stack(ids, dim=1))


def expert_fingerprints(expert_ids: Tensor) -> Tensor:
    """[R] int64 of expert ids [R, layers, k], ascending in each layer: a polynomial in them, modulo
    2^64."""
    flat = expert_ids.flatten(1) + 1
    powers = torch.full((flat.shape[1],), _BASE, dtype=torch.int64, device=flat.device).cumprod(0)
    return (flat * powers).sum(dim=1)


_BASE = 0x5851F42D4C957F2D
"""An odd multiplier of good spread (Knuth's MMIX)."""

_record: ContextVar[RoutingRecord | None] = ContextVar("routing_record", default=None)


@contextmanager
def recorded_routing() -> Iterator[RoutingRecord]:
    """Keep the routing of the one forward pass inside the block, in this thread.

    What gradient checkpointing computes again after the block is not kept.
    """
    record = RoutingRecord()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def record_routing(logits: Tensor, expert_ids: Tensor) -> None:
    """Keep a layer's routing where a block asks for it."""
    if (record := _record.get()) is not None:
        record.layers.append(Routed(logits, expert_ids))
