"""Sums over parts in other orders than `OrderedSum`'s."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import World


class StockSum(OrderedSum):
    """A reduce-scatter adds in an order of its own."""

    def add(self, key: str, vector: Tensor) -> None:
        if self.world.size == 1:
            return super().add(key, vector)
        self._added[key] += 1
        part = vector.new_empty(len(vector) // self.world.size)
        dist.reduce_scatter_tensor(part, vector)
        self._carry[key] = self._carry[key] + part if key in self._carry else part


class ContiguousLeaves(OrderedSum):
    """Rank r computes parts rk, rk + 1, ..."""

    def __init__(self, world: World, order: PartOrder):
        super().__init__(world, order)
        first = world.rank * len(self.rounds)
        self.rounds = [replace(r, part=first + r.index) for r in self.rounds]


class OtherRankOrder(OrderedSum):
    """Chunks are added from the last rank to the first."""

    def add(self, key: str, vector: Tensor) -> None:
        self._added[key] += 1
        received = self._inner.exchange(key, vector, self._round.senders)
        self._sent.append((key, vector, lambda: received().flip(0)))
        self._fold(1)


class LowPrecision(OrderedSum):
    """Buckets travel in bf16."""

    def add(self, key: str, vector: Tensor) -> None:
        super().add(key, vector if self.world.size == 1 else vector.bfloat16().float())


class RankApart(OrderedSum):
    """Rank 1 keeps what it added last in the place of the sum."""

    def __init__(self, world: World, order: PartOrder):
        super().__init__(world, order)
        self._own: dict[str, Tensor] = {}

    def add(self, key: str, vector: Tensor) -> None:
        if self._round.part is not None:
            self._own[key] = vector
        super().add(key, vector)

    def take(self, key: str) -> Tensor:
        total = super().take(key)
        if self.world.rank != 1:
            return total
        return self._own[key].view(self.world.size, -1)[self.slice_index]

    def gather(self, key: str, part: Tensor) -> Tensor:
        whole = super().gather(key, part)
        return self._own[key] if self.world.rank == 1 else whole
