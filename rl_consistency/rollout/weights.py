"""Whether what the engine keeps may still be used: cached keys and values, and CUDA graphs.

They hold as long as the weights, the forward pass and the library products stay the same.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module

from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.reduction.weights_digest import weights_digest
from rl_consistency.models.patch import patched_session
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import Strictness, current

_LOOK_EVERY = 16
"""Steps between two looks at the parameters' versions: some 30 us for 400 parameters."""


def model_digest(model: Any) -> str:
    """Digest of a model's parameters by name, where they lie; waits for the device.

    The trainer hands it over after an optimizer step, and the engine compares it.
    """
    return weights_digest(model.named_parameters())


def forward_path(model: Any) -> tuple[object, ...]:
    """What a patched model's forward pass runs, without its weights: the patch session, the
    modules' classes, and the forward hooks, named by numbers that PyTorch never gives twice.

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
    """What keys and values depend on, beside the tokens."""

    digest: str
    strictness: Strictness
    path: tuple[object, ...]
    generation: int
    """Of the library products: `audit.generation`."""


class WeightsWatch:
    """Compares the weights of a model, and what computes with them, from rollout to rollout.

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
        self._generation = audit.generation()
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self._num_steps = 0

    def library_generation(self) -> int:
        """The generation of library products in use; the host waits for the devices.

        Warns of products withdrawn since the last call. The trainer decides whether that is an
        error (`consistency.on_drift`).
        """
        before, self._generation = self._generation, audit.generation()
        if self._generation > before:
            warnings.warn(
                "sampled library matrix products differ from the canonical order; withdrawn: "
                f"{', '.join(audit.withdrawn_since(before))}. They are not used again, and the "
                "engine drops its graphs and cached keys, but tokens drawn and logprobs computed "
                "since the last rollout began may have other bits: draw them anew, and continue "
                "training from a checkpoint made before.",
                stacklevel=2,
            )
        return self._generation

    def take_over(self, given: str | None, generation: int) -> bool:
        """Look at the model before a rollout; True if nothing cached before may be used.

        Args:
            given: the digest of the weights as the trainer left them; None compares nothing.
            generation: of the library products in use.

        Raises:
            ConsistencyError: the weights have another digest.
        """
        before, self._held = self._held, None
        path = forward_path(self._model)
        self._parameters = list(self._model.parameters())
        self._versions = self._look()
        self._num_steps = 0
        held = _Origin(model_digest(self._model), current(), path, generation)
        _compare(given, held.digest)
        self._held = held
        return held != before

    def compare(self, given: str | None) -> None:
        """ConsistencyError if a given digest is not that of the weights in use."""
        assert self._held is not None
        _compare(given, self._held.digest)

    def after_step(self, *, ends_samples: bool) -> None:
        """A cheap look after a step at the ops; and at the parameters every few steps, and whenever
        a sample is given away.

        It sees writes in place and parameters that moved; only `after_rollout` sees a write through
        `.data`. Either raises a ConsistencyError for a change while samples are under way.
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
        """The cheap look, then compare digest and forward pass with those before the rollout.

        A change that was undone is seen if it left a version.
        """
        self.after_step(ends_samples=True)
        assert self._held is not None
        before, after = self._held.digest, model_digest(self._model)
        if after != before:
            _fail(f"their digest was {before} and is {after}")
        if forward_path(self._model) != self._held.path:
            raise ConsistencyError(
                "the model was patched again, or forward hooks or modules were changed, during "
                "generation; do so only when generate has returned, or the stream is closed"
            )

    def _look(self) -> list[int]:
        """Address and version of every parameter."""
        parameters = self._parameters
        return [p.data_ptr() for p in parameters] + [p._version for p in parameters]


def _compare(given: str | None, held: str) -> None:
    if given is not None and given != held:
        raise ConsistencyError(
            f"the weights were handed over with digest {given} and the engine reads weights of "
            f"digest {held}: they were changed since, or they are not the trainer's"
        )


def _stock_ops(strictness: Strictness) -> str:
    return ", ".join(sorted(strictness.stock)) or "none"


def _fail(what: str) -> None:
    raise ConsistencyError(
        f"the weights were changed during generation: {what}. The samples under way mix two "
        "policies; step the optimizer only when generate has returned, or the stream is closed"
    )
