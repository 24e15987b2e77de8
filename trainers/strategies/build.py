"""The strategy that a recipe names."""

from __future__ import annotations

from torch import nn

from rl_consistency.distributed.world import World
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.strategies.fsdp2 import FSDP2
from rl_consistency.trainers.strategies.replicated import Replicated
from rl_consistency.trainers.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {"replicated": Replicated, "fsdp2": FSDP2}


def build_strategy(config: RunConfig, world: World, policy: nn.Module) -> Strategy:
    """That of `training.strategy`.

    Every rank calls it, with the same weights in a patched policy.
    """
    strategy, consistency = STRATEGIES[config.training.strategy], config.consistency
    return strategy(world, consistency.gradient_leaves, policy, ordered=consistency.ordered)
