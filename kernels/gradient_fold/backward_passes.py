"""The backward passes of one model, of which one runs at a time.

A pass begins with the first gradient that is folded in it and ends when autograd calls back. One
within another, as reentrant checkpointing makes them, belongs to the outer one.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch.autograd import Variable


class Gradient(Protocol):
    """What takes part in a pass."""

    def publish(self) -> str:
        """Called when a pass has ended; what is wrong with the gradient, or nothing."""
        ...

    def abandon(self) -> None:
        """Called when a pass has ended in an error, though this gradient may be no part of it."""
        ...


class BackwardPasses:
    """Which pass runs, and what takes part in it."""

    def __init__(self) -> None:
        self._gradients: weakref.WeakSet[Gradient] = weakref.WeakSet()
        self._end: weakref.ref[_End] | None = None
        """Of the pass that runs; autograd drops it together with the pass."""
        self._closed = False

    def watch(self, gradient: Gradient) -> None:
        """Tell this gradient of passes that end in an error."""
        self._gradients.add(gradient)

    def enter(self) -> _End:
        """The pass that runs, begun if none does.

        ValueError if no more may begin, and for a graph of the gradients.
        """
        end = self._end and self._end()
        if end is not None:
            return end
        if self._closed:
            raise ValueError(
                "the model was restored between forward and backward. Call backward() before "
                "restore(), inside the `with patch(...)` block."
            )
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: gradients of gradients are not covered, and would be zero. "
                "Leave it out, or compute that term inside session.stock()."
            )
        end = _End(self)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportAttributeAccessIssue]
        return end

    def enter_forward(self) -> None:
        """Begin the backward pass of a forward pass; ValueError on a second one in it."""
        self.enter().require_only("the model")

    def close(self) -> None:
        """Let no more pass begin."""
        self._closed = True

    def abandon(self) -> None:
        """Tell all gradients that a pass has ended in an error."""
        for gradient in list(self._gradients):
            gradient.abandon()


class _End:
    """A pass: what autograd calls at its end, and drops without a call after an error."""

    def __init__(self, passes: BackwardPasses):
        self._passes = passes
        self.folded: list[Gradient] = []
        self._seen: set[str] = set()
        self._done = False

    def require_only(self, name: str) -> None:
        """ValueError the second time."""
        if name in self._seen:
            raise ValueError(several_forward_passes(name))
        self._seen.add(name)

    def __call__(self) -> None:
        errors = [error for gradient in self.folded if (error := gradient.publish())]
        self._done, self._passes._end = True, None
        if errors:
            raise ValueError(errors[0])

    def __del__(self) -> None:
        if not self._done:
            self._passes.abandon()


def several_forward_passes(what: str) -> str:
    """Why a parameter or a model may take part in one backward pass only once."""
    return (
        f"{what} took part in several forward passes that go backward together, which would make "
        "gradients depend on how the batch was cut. Call backward() once per forward pass; "
        "gradients add up."
    )
