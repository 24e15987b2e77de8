"""Whether what the engine keeps may still be used: cached keys and values, and CUDA graphs.

They hold as long as the weights, the forward pass and the library products stay the same.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.reduction.weights_digest import PlacedDigest, fit, weights_digest
from rl_consistency.models.inventory import ForwardState
from rl_consistency.models.patch import PatchSession, forward_path
from rl_consistency.models.sharding import is_sharded
from rl_consistency.models.snapshot import Snapshot
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import verify_settings
from rl_consistency.numerics.strict import Strictness, current
from rl_consistency.rollout.step_watch import StepWatch

_CHANGED = (
    "the model was patched again, or its hooks, modules, attributes or config were changed, during "
    "generation; do so only when generate has returned, or the stream is closed"
)
_MEAN_STEPS = 512
"""Mean number of steps to the next digest within a rollout, which costs about as much as a step."""


def model_digest(model: Any) -> str:
    """Digest of a model's weights by name, where they lie; waits for the device.

    Every rank calls it if the parameters are shards; the digest is that of whole ones.
    """
    with whole_weights(model) as policy:
        return weights_digest(_weights(policy))


def _weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that a forward pass reads: it has rotary frequencies from the
    config."""
    yield from policy.named_parameters()
    yield from (named for named in policy.named_buffers() if not named[0].endswith("inv_freq"))


ForwardPath = tuple[PatchSession, ForwardState]
"""See `models.patch.forward_path`."""


class _Origin(NamedTuple):
    """What keys and values depend on, beside the tokens."""

    digest: str
    strictness: Strictness
    path: ForwardPath
    withdrawals: int  # of library products


class _Placed(NamedTuple):
    """A model's weights where they lie."""

    snapshot: Snapshot
    addresses: list[object]
    weights: list[tuple[str, Tensor]]
    digest: PlacedDigest | None  # None: other tensors than it reads
    is_lent: bool  # by the ranks that have the weights, for one rollout


class WeightsWatch:
    """Compares the weights of a patched model, and what computes with them, between rollouts."""

    def __init__(self, model: Any) -> None:
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ValueError(
                "the model was made under torch.inference_mode, where changes of its weights leave "
                "no trace; make it under torch.no_grad"
            )
        self._model = model
        self._held: _Origin | None = None  # of the rollout under way, else of the last
        self._withdrawals = audit.withdrawals()
        self._steps: StepWatch | None = None  # of the rollout under way
        self._placed: _Placed | None = None
        self._begun: Callable[[], str] = lambda: ""  # of the rollout that is about to begin
        self._drawn = random.Random()  # of its own: the user's random numbers stay as they are
        self._num_steps = self._next_digest = 0
        self._looks_at_all = False

    @property
    def digest(self) -> str:
        """Of the weights in use."""
        assert self._held is not None
        return self._held.digest

    def withdrawals(self) -> int:
        """Number of library products withdrawn so far, with a warning of those since the last call;
        the host waits for the devices."""
        before, self._withdrawals = self._withdrawals, audit.withdrawals()
        if self._withdrawals > before:
            warnings.warn(
                "sampled library matrix products differ from the canonical order; withdrawn: "
                f"{', '.join(audit.withdrawn_since(before))}. The engine drops its graphs and "
                "cached keys, but tokens drawn and logprobs computed since the last rollout began "
                "may have other bits: draw them again, and train on from a checkpoint made before.",
                stacklevel=2,
            )
        return self._withdrawals

    def look(self) -> ForwardPath:
        """Look at the model before a rollout, and begin to read its weights."""
        path = forward_path(self._model)
        snapshot = path[0].snapshot()
        addresses, placed = snapshot.addresses(), self._placed
        if placed is None or placed.snapshot is not snapshot or placed.addresses != addresses:
            weights = list(_weights(self._model))
            fits = fit([tensor for _, tensor in weights])
            digest = PlacedDigest(weights) if fits else None
            lent = is_sharded(self._model)
            self._placed = placed = _Placed(snapshot, addresses, weights, digest, lent)
        self._begun = self._launched()
        self._steps = StepWatch(snapshot, placed.weights)
        return path

    def take_over(self, given: str | None, withdrawals: int, path: ForwardPath) -> bool:
        """Take what `look` saw for that of the rollout; True if nothing cached before may be used:
        after any change, and always while modules have hooks.

        ConsistencyError if the weights have another digest than the `given` one, if any.
        """
        before, self._held = self._held, None
        self._num_steps, self._next_digest = 0, self._gap()
        held = _Origin(self._begun(), current(), path, withdrawals)
        _compare(given, held.digest)
        self._held = held
        # What a hook reads may have changed, and leaves no trace here.
        return held != before or path[1].hooked

    def compare(self, given: str | None) -> None:
        """ConsistencyError if a given digest is not that of the weights in use."""
        _compare(given, self.digest)

    def in_step(self, is_busy: Callable[[], bool] | None) -> None:
        """Look at what a forward reads: all of it on a CPU, where `is_busy` is None, and after
        `look_at_all`, else what can be seen while a device is busy; see `StepWatch`.

        ConsistencyError naming what was changed since the rollout began.
        """
        self._num_steps += 1
        self._compare_step(None if self._looks_at_all else is_busy)
        self._looks_at_all = False

    def look_at_all(self) -> None:
        """Let the next step look at everything: a caller of the engine has run meanwhile."""
        self._looks_at_all = True

    def after_step(self) -> None:
        """Compare the settings of the ops, and at steps drawn at random all that `after_rollout`
        compares. ConsistencyError for a difference."""
        assert self._held is not None
        verify_settings()
        if (now := current()) != (before := self._held.strictness):
            ops = [", ".join(sorted(strictness.stock)) or "none" for strictness in (before, now)]
            raise ConsistencyError(
                f"ops on their stock path were changed during generation, from {ops[0]} to {ops[1]}"
                "; keep the `strict` choice that the rollout began with"
            )
        if self._num_steps >= self._next_digest:
            self._next_digest += self._gap()
            self._compare_all(self._launched())

    def after_rollout(self) -> None:
        """Compare settings, digest and forward pass with those before the rollout."""
        self.after_step()
        digest = self._launched()
        self._compare_step(None)
        self._compare_all(digest)
        self.end()

    def end(self) -> None:
        """Let go of the weights' memory."""
        self._steps = None
        if self._placed is not None and self._placed.is_lent:
            self._placed = None

    def _launched(self) -> Callable[[], str]:
        """Begin to read all weights; what is returned waits for their digest."""
        if self._placed is not None and self._placed.digest is not None:
            return self._placed.digest.launch()
        digest = model_digest(self._model)
        return lambda: digest

    def _compare_step(self, is_busy: Callable[[], bool] | None) -> None:
        assert self._steps is not None
        if (change := self._steps.look(is_busy)) is not None:
            what = f"{change.what} (seen in step {self._num_steps})"
            _fail(what) if change.of_weights else _fail_path(what)

    def _compare_all(self, digest: Callable[[], str]) -> None:
        """Compare the forward pass, while the digest is computed, and then that."""
        assert self._held is not None
        changed, problem = False, None
        try:
            changed = forward_path(self._model) != self._held.path
        except ValueError as error:  # it cannot even be honoured
            problem = error
        if (after := digest()) != (before := self._held.digest):
            _fail(f"their digest was {before} and is {after}")
        if problem is not None:
            raise ConsistencyError(f"{_CHANGED}: {problem}") from problem
        if changed:
            raise ConsistencyError(_CHANGED)

    def _gap(self) -> int:
        return self._drawn.randrange(1, 2 * _MEAN_STEPS)


def _compare(given: str | None, digest: str) -> None:
    if given is not None and given != digest:
        raise ConsistencyError(
            f"the weights were handed over with digest {given} and the engine reads weights of "
            f"digest {digest}: they were changed since, or are not the trainer's"
        )


def _fail(what: str) -> None:
    raise ConsistencyError(
        f"the weights were changed during generation: {what}. The samples under way mix two "
        "policies; step the optimizer only when generate has returned, or the stream is closed"
    )


def _fail_path(what: str) -> None:
    raise ConsistencyError(f"{_CHANGED}: {what}")
