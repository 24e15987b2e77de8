"""Whether the model is the one that the cached keys and values were computed with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module

from rl_consistency.kernels.reduction.weights_digest import weights_digest
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


def forward_path(model: Any) -> tuple[object, ...]:
    """What a patched model's forward pass runs beside its weights, to be compared: its patch
    session, its modules' classes, and the forward hooks on them and on all modules.

    Hooks are named by the numbers PyTorch gives them, which are never used again.

    Raises:
        ValueError: the model is not patched.
    """
    everywhere = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    modules = tuple(
        (name, type(module), *chain(module._forward_pre_hooks, "/", module._forward_hooks))
        for name, module in model.named_modules()
    )
    return patched_session(model), *chain(everywhere[0], "/", everywhere[1]), modules


@dataclass(frozen=True)
class _Origin:
    """What keys and values depend on beside the tokens."""

    digest: str
    strictness: Strictness
    path: tuple[object, ...]
    generation: int
    """Of the library products in use: `audit.generation`."""


class WeightsWatch:
    """Follows the weights of a model, and what computes with them, through the rollouts.

    Args:
        model: the patched model whose parameters the engine reads in place.

    Raises:
        ValueError: its parameters are inference tensors.
    """

    def __init__(self, model: Any) -> None:
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ValueError(
                "the model was made under torch.inference_mode, where changes of its weights leave "
                "no trace; make it under torch.no_grad"
            )
        self._model = model
        self._held: _Origin | None = None  # of the rollout under way, else of the last
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._num_steps = 0

    def take_over(self, given: str | None, generation: int) -> bool:
        """Look at the model before a rollout; True if nothing cached before may be used.

        Args:
            given: the digest whoever last wrote them says they have; None compares nothing.
            generation: of the library products in use.

        Raises:
            ConsistencyError: they have another.
            ValueError: the model is not patched.
        """
        before, self._held = self._held, None
        path = forward_path(self._model)
        self._parameters = list(self._model.parameters())
        self._versions = self._look()
        self._num_steps = 0
        digest = model_digest(self._model)
        self.compare(given, digest)
        self._held = _Origin(digest, current(), path, generation)
        return self._held != before

    def compare(self, given: str | None, held: str | None = None) -> None:
        """ConsistencyError if a given digest is not that of the weights in use."""
        if held is None:
            assert self._held is not None
            held = self._held.digest
        if given is not None and given != held:
            raise ConsistencyError(
                f"the weights were handed over with digest {given} and the engine reads weights of "
                f"digest {held}: they were changed since, or they are not the trainer's"
            )

    def after_step(self, *, ends_samples: bool) -> None:
        """A cheap look after a step: at the ops, and every few steps, and whenever a sample is
        given away, at the parameters.

        It sees writes in place and parameters moved to other memory, not a write through `.data`,
        which `after_rollout` sees.

        Raises:
            ConsistencyError: the ops or the weights were changed while samples were under way.
        """
        assert self._held is not None
        if (now := current()) != self._held.strictness:
            before = _stock_ops(self._held.strictness)
            raise ConsistencyError(
                f"ops on their stock path were changed during generation, from {before} to "
                f"{_stock_ops(now)}; take in a stream, and step, under the `strict` choice that "
                "it began with"
            )
        self._num_steps += 1
        is_due = ends_samples or self._num_steps % _LOOK_EVERY == 0
        if is_due and self._look() != self._versions:
            _fail("a parameter was written or moved")

    def after_rollout(self) -> None:
        """The cheap look, and compare digest and forward pass with those before.

        What was changed and changed back is seen if it left a version.

        Raises:
            ConsistencyError: the model was changed while samples were under way.
        """
        self.after_step(ends_samples=True)
        assert self._held is not None
        before, after = self._held.digest, model_digest(self._model)
        if after != before:
            _fail(f"their digest was {before} and is {after}")
        if forward_path(self._model) != self._held.path:
            raise ConsistencyError(
                "the model was patched anew, or forward hooks or modules were changed, during "
                "generation; do so only when generate has returned, or the stream is closed"
            )

    def _look(self) -> list[int]:
        """Address and version of every parameter."""
        parameters = self._parameters
        return [p.data_ptr() for p in parameters] + [p._version for p in parameters]


def _stock_ops(strictness: Strictness) -> str:
    return ", ".join(sorted(strictness.stock)) or "none"


def _fail(what: str) -> None:
    raise ConsistencyError(
        f"the weights were changed during generation: {what}. The samples under way mix two "
        "policies; step the optimizer only when generate has returned, or the stream is closed"
    )
