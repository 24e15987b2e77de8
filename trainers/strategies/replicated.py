"""Every rank has all weights, moments and gradients, and computes the passes of its own leaves.

No wrapper stands around the policy, so a forward pass sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_consistency.distributed.leaves import LeafOrder
from rl_consistency.distributed.world import World
from rl_consistency.trainers.strategies.strategy import Backward, Strategy, required


class Replicated(Strategy):
    """The gradient is summed in order, slice by slice, and gathered into `.grad`."""

    def __init__(self, world: World, order: LeafOrder, policy: nn.Module, *, ordered: bool = True):
        super().__init__(world, order, policy, ordered=ordered)
        self._parameters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        if self._sum is not None and ordered:
            self._collect(self._sum, self._parameters)

    def accumulate(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        if self._sum is None:
            for batch in self.passes(num_sequences, size, self.rounds[0]):
                backward(batch, False)
            return self.norm(self.gradients())
        if not self.ordered:
            return self._stock_sum(num_sequences, size, backward)
        for round in self._buckets.step():
            if round.leaf is None:
                continue
            *others, last = filter(None, self.passes(num_sequences, size, round))
            for batch in others:
                backward(batch, False)
            self._gives = True
            try:
                backward(last, False)
            finally:
                self._gives = False
        norm = self.norm(self._buckets.take())
        for name, gradient in self._buckets.gather():
            self._parameters[name].grad = gradient
        return norm

    def _stock_sum(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        for round in self.rounds:
            for batch in filter(None, self.passes(num_sequences, size, round)):
                backward(batch, False)
        gradients = self.gradients()
        for name, gradient in gradients.items():
            with self.world.naming(f"gradient {name}: all-reduce"):
                dist.all_reduce(gradient)
        return self.norm(gradients if self.world.rank == 0 else {})

    def masters(self) -> dict[str, nn.Parameter]:
        return {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._parameters.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        return {name: required(name, p.grad) for name, p in self._parameters.items()}

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def update(
        self, optimizer: Any, masters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
    ) -> None:
        super().update(optimizer, masters, gradients)
        for name, parameter in self._parameters.items():
            if parameter is not masters[name]:
                parameter.copy_(masters[name])
