"""The backward passes of one model, of which one runs at a time.

A pass begins with the first gradient that is folded in it and ends when autograd calls back. One
within another, as reentrant checkpointing makes them, belongs to the outer one.
"""

from __future__ import annotations

import weakref
from typing import Protocol

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
        self._gradients: list[Gradient] = []
        self._folded: list[Gradient] = []
        self._end: weakref.ref[_End] | None = None
        """Of the pass that was begun last; autograd drops it together with the pass."""
        self._closed = False

    def watch(self, gradient: Gradient) -> None:
        """Tell this gradient of passes that end in an error."""
        self._gradients.append(gradient)

    def enter(self) -> None:
        """Begin a pass unless one runs. ValueError if no more may begin."""
        if self._end is not None and self._end() is not None:
            return
        self.clear()
        if self._closed:
            raise ValueError(
                "the model was restored between forward and backward. Call backward() before "
                "restore(), inside the `with patch(...)` block."
            )
        end = _End(self)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportAttributeAccessIssue]

    def add(self, gradient: Gradient) -> None:
        """Have the gradient published when the pass has ended."""
        self._folded.append(gradient)

    def close(self) -> None:
        """Let no more pass begin."""
        self.clear()
        self._closed = True

    def clear(self) -> None:
        """Tell all gradients if the last pass has ended in an error."""
        if self._end is None or self._end() is not None:
            return
        self._end = None
        self._folded.clear()
        for gradient in self._gradients:
            gradient.abandon()


class _End:
    """What autograd calls at the end of a pass."""

    def __init__(self, passes: BackwardPasses):
        self._passes = passes

    def __call__(self) -> None:
        folded, self._passes._folded = self._passes._folded, []
        self._passes._end = None
        errors = [error for gradient in folded if (error := gradient.publish())]
        if errors:
            raise ValueError(errors[0])
