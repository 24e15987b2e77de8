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


class Reference:
    """A copy of a policy that is not patched yet, and `file`, which keeps its weights.

    `begin` or `resume` gives it the weights and patches it; `stack` undoes the patch.
    """

    def __init__(self, policy: Any, file: Path, world: World, stack: ExitStack) -> None:
        self.model = copy.deepcopy(policy)
        self.digest: str | None = None
        """SHA-256 of the weights' file, once they are there."""
        self._file, self._world, self._stack = file, world, stack

    def begin(self, policy: Any) -> None:
        """Keep the weights that the policy has now. Every rank calls it."""
        save = partial(save_weights, self._file, policy)
        with whole_weights(policy):
            digest = self._world.from_first("the reference", save)
        self.resume(digest)

    def resume(self, digest: str) -> None:
        """Take the weights of the file; CheckpointError where it has another digest."""
        with self._world.agreed("the reference"):
            load_frozen(self.model, self._file, digest)
        self._stack.enter_context(patch(self.model))
        self.digest = digest
