"""The frozen policy of the KL term: the weights that a run began with."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rl_consistency.distributed.world import World
from rl_consistency.models.patch import patch
from rl_consistency.models.sharding import whole_weights
from rl_consistency.trainers.run_directory.checkpoint import load_frozen, save_weights


class ReferencePolicy:
    """A copy of a policy that is not patched yet.

    `begin` or `resume` gives it the weights of a file and patches it; `stack` undoes the patch.
    """

    def __init__(self, policy: Any, world: World, stack: ExitStack) -> None:
        self.model = copy.deepcopy(policy)
        self.digest: str | None = None
        """SHA-256 of the weights' file, once they are there."""
        self._world, self._stack = world, stack

    def begin(self, file: Path, policy: Any) -> None:
        """Keep the weights that the policy has now. Every rank calls it."""
        save = partial(save_weights, file, policy)
        with whole_weights(policy):
            digest = self._world.from_first("the reference", save)
        self.resume(file, digest)

    def resume(self, file: Path, digest: str) -> None:
        """Take the weights of the file; CheckpointError where it has another digest."""
        with self._world.agreed("the reference"):
            load_frozen(self.model, file, digest)
        self._stack.enter_context(patch(self.model))
        self.digest = digest
