"""What the rows of a forward pass were routed to, for callers that record it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses, ForwardPass
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import is_canonical


class Routed(NamedTuple):
    """The routing of one layer."""

    logits: Tensor | None
    """[R, E], differentiable; fp32 but on the stock path. None where they are not asked for."""
    expert_ids: Tensor
    """[R, k], ascending in each row but on the stock path."""


@dataclass(eq=False)
class RoutingRecord:
    """The routing of a forward pass: of all sparse layers, in their order."""

    keeps_logits: bool = False
    layers: list[Routed] = field(default_factory=list)
    ran_without_gradients: bool = False
    """Whether a layer ran without gradients, as in checkpointing with `use_reentrant`."""
    forward: tuple[BackwardPasses, ForwardPass] | None = None
    """The forward pass, among the backward passes of its model."""

    def fingerprints(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """([n] int64 on the device: see `expert_fingerprints`,) of some rows, or of all; nothing in
        a dense model."""
        if not self.layers:
            return ()
        ids = [each.expert_ids if rows is None else each.expert_ids[rows] for each in self.layers]
        if not is_canonical("router"):
            ids = [each.sort(dim=1).values for each in ids]
        if len(chosen := {each.shape[1] for each in ids}) > 1:
            raise ConsistencyError(
                f"routers of one model chose {' and '.join(map(str, sorted(chosen)))} experts of a "
                "row: a top_k was changed since the model was patched. Change the config and patch "
                "the model anew."
            )
        return (expert_fingerprints(torch.stack(ids, dim=1)),)


def expert_fingerprints(expert_ids: Tensor) -> Tensor:
    """[R] int64 of expert ids [R, layers, k], ascending in each layer: one number for all experts
    that a row met, a polynomial modulo 2^64. Other experts have it by a chance of about 2^-64."""
    flat = expert_ids.flatten(1).long() + 1
    base = 0x5851F42D4C957F2D  # an odd multiplier of good spread (Knuth's MMIX)
    powers = torch.full((flat.shape[1],), base, dtype=torch.int64, device=flat.device).cumprod(0)
    return (flat * powers).sum(dim=1)


_record: ContextVar[RoutingRecord | None] = ContextVar("routing_record", default=None)


@contextmanager
def recorded_routing(*, logits: bool = False) -> Iterator[RoutingRecord]:
    """Keep the routing of the one forward pass inside the block, in this thread; `logits` too.

    What gradient checkpointing computes again after the block is not kept.
    """
    record = RoutingRecord(logits)
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@contextmanager
def stock_routing(model: nn.Module) -> Iterator[list[Tensor]]:
    """The routing of each forward pass of an unpatched model inside the block: [rows]
    `expert_fingerprints` of all rows, padding too. A dense model gives none."""
    found, layers = list[Tensor](), list[Tensor]()

    def keep(gate: nn.Module, given: object, result: tuple[Tensor, Tensor, Tensor]) -> None:
        layers.append(result[2].sort(dim=1).values)

    def join(*_: object) -> None:
        if layers:
            found.append(expert_fingerprints(torch.stack(layers, dim=1)))
            layers.clear()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                stack.callback(module.register_forward_hook(keep).remove)
        stack.callback(model.register_forward_hook(join).remove)
        yield found


def record_forward(passes: BackwardPasses, forward: ForwardPass) -> None:
    """Keep the forward pass itself where a block asks for its routing."""
    if (record := _record.get()) is not None:
        record.forward = passes, forward


def record_routing(logits: Tensor, expert_ids: Tensor) -> None:
    """Keep a layer's routing where a block asks for it."""
    if (record := _record.get()) is not None:
        record.layers.append(Routed(logits if record.keeps_logits else None, expert_ids))
        record.ran_without_gradients |= not torch.is_grad_enabled()
