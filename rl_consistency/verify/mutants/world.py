"""Ways to make the weights depend on how many processes trained them; see `verify --world`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.distributed.gradient_norm import sharded_gradient_norm
from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.build import build_strategy
from rl_consistency.trainers.strategies.strategy import Replicated, Strategy
from rl_consistency.verify.mutants import sums
from rl_consistency.verify.mutants.mutant import Mutant, mutant
from rl_consistency.verify.substitution import attribute, substituted

ALL = "C4 replicated; fsdp2; zero1; zero2; zero3"
IN_PLACE_OF_THE_SUM = substituted, OrderedSum

reduce_scatter = mutant("reduce-scatter", ALL, at=IN_PLACE_OF_THE_SUM)(sums.StockSum)
contiguous_leaves = mutant("contiguous leaves", ALL, at=IN_PLACE_OF_THE_SUM)(sums.ContiguousLeaves)
other_rank_order = mutant("ranks backwards", ALL, at=IN_PLACE_OF_THE_SUM)(sums.OtherRankOrder)
low_precision = mutant("bf16 buckets", ALL, at=IN_PLACE_OF_THE_SUM)(sums.LowPrecision)
rank_apart = mutant("unsynchronised rank", ALL, at=IN_PLACE_OF_THE_SUM)(sums.RankApart)


def _built(config: RunConfig, world: World, policy: nn.Module, **changes: Any) -> Strategy:
    consistency = config.consistency.model_copy(update=changes)
    return build_strategy(config.model_copy(update={"consistency": consistency}), world, policy)


@mutant("stock sum", ALL, at=(substituted, build_strategy))
def stock_sum(config: RunConfig, world: World, policy: nn.Module) -> Strategy:
    """NCCL or gloo adds the ranks' gradients."""
    return _built(config, world, policy, ordered=False)


@mutant("leaves tied to ranks", ALL, at=(substituted, build_strategy))
def leaves_tied_to_ranks(config: RunConfig, world: World, policy: nn.Module) -> Strategy:
    """There are as many leaves as processes."""
    return _built(config, world, policy, gradient_leaves=PartOrder(world.size))


_give = Replicated._give


@mutant("fold continued", "C4 replicated", at=(attribute, Replicated, "_give"))
def fold_goes_on(self: Replicated, name: str, parameter: Tensor) -> None:
    """A rank's fold goes on from leaf to leaf; what it gives is zero until its last."""
    last = max(r.index for r in self.rounds if r.part is not None)
    assert self._sum is not None and parameter.grad is not None
    if self._gives and self._sum._round.index < last:
        self._buckets.put(name, torch.zeros_like(parameter.grad))
    else:
        _give(self, name, parameter)


@mutant("norm over shards", ALL, at=(substituted, sharded_gradient_norm))
def norm_over_shards(world: World, parts: Mapping[str, Tensor], numels: Mapping[str, int]) -> float:
    """Each rank adds the squares of what it has, and the ranks' sums are added."""
    own = sum(float(part.square().sum()) for part in parts.values())
    return sum(world.gather("squares", own)) ** 0.5


_step = PolicyOptimizer.step


@mutant("schedule per process", ALL, at=(attribute, PolicyOptimizer, "step"))
def one_scheduler_step_per_process(self: PolicyOptimizer, norm: float | None = None) -> float:
    """The learning rate falls by a step for each process."""
    found = _step(self, norm)
    for _ in range(self._ranks.world.size - 1):
        self._schedule.step()
    return found


WORLD_MUTANTS = tuple(value for value in globals().values() if isinstance(value, Mutant))
"""Every wrong program that the hash table must find in each of the strategies named."""
