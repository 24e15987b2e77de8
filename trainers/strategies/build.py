"""The strategy that a recipe or a launcher names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from rl_consistency.distributed.world import World
from rl_consistency.numerics.strict import current
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.strategies.fsdp2 import FSDP2
from rl_consistency.trainers.strategies.strategy import Replicated, Strategy
from rl_consistency.trainers.strategies.zero import Zero

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "replicated": Replicated,
    "fsdp2": FSDP2,
    **{f"zero{stage}": partial(Zero, stage=stage) for stage in (1, 2, 3)},
}


def check_canonical(config: RunConfig) -> None:
    """ValueError where processes share work that ops on their stock path would do."""
    consistency = config.consistency
    shared = consistency.gradient_leaves.count > 1 or not consistency.ordered
    if shared and current().stock:
        key = "gradient_leaves" if consistency.ordered else "ordered: false"
        raise ValueError(f"consistency.{key} needs canonical ops: set strict to true")


def build_strategy(config: RunConfig, world: World, policy: nn.Module) -> Strategy:
    """The strategy of a checked recipe. Every rank calls it, with equal weights, patched."""
    consistency = config.consistency
    strategy = STRATEGIES[config.training.strategy or "replicated"]
    return strategy(world, consistency.gradient_leaves, policy, ordered=consistency.ordered)
