"""Whether the weights are those that the cached keys and values were computed with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_consistency.kernels.weights_digest import weights_digest
from rl_consistency.models.patch import patched_session
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import Strictness, current

_LOOK_EVERY = 16
"""Steps between two looks at the parameters' versions: some 30 us for 400 parameters."""


def model_digest(model: Any) -> str:
    """Digest of a model's parameters by name, where they lie; waits for the device.

    What the trainer hands over after an optimizer step and the engine compares.
    """
    return weights_digest(model.named_parameters())


class WeightsWatch:
    """Follows the weights of a model from rollout to rollout and within one.

    Args:
        model: the patched model whose parameters the engine reads in place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: tuple[str, Strictness] | None = None
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._num_steps = 0

    def take_over(self, given: str | None) -> bool:
        """Look at the weights before a rollout; True if nothing cached before may be used.

        Args:
            given: the digest whoever last wrote them says they have; None compares nothing.

        Raises:
            ConsistencyError: they have another.
            ValueError: the model is not patched.
        """
        patched_session(self._model)
        before, self._held = self._held, None
        self._parameters = list(self._model.parameters())
        self._versions = self._look()
        self._num_steps = 0
        digest = model_digest(self._model)
        self.compare(given, digest)
        # Ops on their stock paths give other keys and values from the same weights.
        self._held = (digest, current())
        return self._held != before

    def compare(self, given: str | None, held: str | None = None) -> None:
        """ConsistencyError if a given digest is not that of the weights in use."""
        if held is None:
            assert self._held is not None
            held = self._held[0]
        if given is not None and given != held:
            raise ConsistencyError(
                f"the weights were handed over with digest {given} and the engine reads weights of "
                f"digest {held}: they were changed since, or they are not the trainer's"
            )

    def after_step(self, *, ends_samples: bool) -> None:
        """A cheap look after a step: every few steps, and whenever a sample is given away.

        It sees writes in place and parameters moved to other memory, not a write through `.data`,
        which `after_rollout` sees.

        Raises:
            ConsistencyError: the weights were changed while samples were under way.
        """
        self._num_steps += 1
        is_due = ends_samples or self._num_steps % _LOOK_EVERY == 0
        if is_due and self._look() != self._versions:
            self._fail("a parameter was written or moved")

    def after_rollout(self) -> None:
        """Compare the digest with the one before; ConsistencyError if the weights were changed."""
        assert self._held is not None
        before, after = self._held[0], model_digest(self._model)
        if after != before:
            self._fail(f"their digest was {before} and is {after}")

    def _look(self) -> list[int]:
        """Address and version of every parameter."""
        parameters = self._parameters
        return [p.data_ptr() for p in parameters] + [p._version for p in parameters]

    def _fail(self, what: str) -> None:
        self._held = None
        raise ConsistencyError(
            f"the weights were changed during generation: {what}. The samples under way mix two "
            "policies; step the optimizer only when generate has returned, or the stream is closed"
        )
