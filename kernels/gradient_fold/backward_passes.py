"""The backward passes of one model, of which one runs at a time.

A pass begins with the first gradient that is folded in it and ends when autograd calls back. One
within another, as reentrant checkpointing makes them, belongs to the outer one.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from rl_consistency.kernels.core.autograd import at_backward_errors


class Gradient(Protocol):
    """What takes part in a pass."""

    @property
    def wanted(self) -> bool:
        """Whether backward passes compute it."""
        ...

    def publish(self) -> str:
        """Called when a pass has ended; what is wrong with the gradient, or nothing."""
        ...

    def abandon(self, lost: bool, latest: int) -> None:
        """Called when a pass has ended in an error, though this gradient may be no part of it.

        `lost`: gradients of parameters were being written. `latest`: the op that folded last. What
        other ops have handed to autograd is taken.
        """
        ...


class ForwardPass:
    """What the backward passes of one forward pass leave behind."""

    wrote = False
    """Whether one of them has written gradients of parameters."""


class BackwardPasses:
    """Which pass runs, and what takes part in it."""

    def __init__(self) -> None:
        self._gradients: weakref.WeakSet[Gradient] = weakref.WeakSet()
        self._folded: list[Gradient] = []
        self._forward: ForwardPass | None = None
        """The forward pass that goes backward in the pass that runs."""
        self._writes = False
        """Whether the pass that runs writes gradients of parameters."""
        self._asked = False
        """Whether `watched_once` was called in the pass that runs."""
        self._latest = -1
        """The number that autograd gave the op which folded last."""
        self._end: weakref.ref[_End] | None = None
        """End of the pass that runs. Autograd alone holds it, so that it is gone after an error."""
        self._closed = False

    def watch(self, gradient: Gradient) -> None:
        """Tell this gradient of passes that end in an error."""
        self._gradients.add(gradient)

    def enter(self, op: int = -1) -> None:
        """Begin a pass unless one runs; ValueError if no more may begin. `op` folds next."""
        self._latest = op
        if self._end is not None and self._end() is not None:
            return
        if self._closed:
            raise ValueError(
                "the model was restored between forward and backward. Call backward() before "
                "restore(), inside the `with patch(...)` block."
            )
        self._folded, self._forward, self._writes, self._asked = [], None, False, False
        end = _End(self)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def again(self) -> bool:
        """Whether an earlier pass of the same forward pass has written gradients."""
        return self._forward is not None and self._forward.wrote

    def enter_forward(self, forward: ForwardPass) -> None:
        """Begin the pass of a forward pass, or go on with another result of it; ValueError on a
        second one if gradients are wanted."""
        self.enter()
        other = self._forward is not None and self._forward is not forward
        if other and any(gradient.wanted for gradient in self._gradients):
            raise ValueError(several_forward_passes("the model"))
        self._forward = forward

    def watched_once(self) -> list[Any]:
        """All gradients at the first call in a pass, then none."""
        asked, self._asked = self._asked, True
        return [] if asked else list(self._gradients)

    def add(self, gradient: Gradient, writes: bool) -> None:
        """Have the gradient published at the end of the pass, which writes it or returns it."""
        self._folded.append(gradient)
        self._writes |= writes

    def close(self) -> None:
        """Let no more pass begin."""
        self._closed = True

    @torch.no_grad()
    def publish(self) -> None:
        """End the pass; ValueError for what is wrong with a gradient."""
        if self._forward is not None:
            self._forward.wrote |= self._writes
        errors = [error for gradient in self._folded if (error := gradient.publish())]
        self._folded = []
        if errors:
            raise ValueError(errors[0])

    def abandon(self) -> None:
        """Tell all gradients that the pass has ended in an error."""
        self._end = None
        for gradient in list(self._gradients):
            gradient.abandon(self._writes, self._latest)


class _End:
    """What autograd calls at the end of a pass, and drops without a call after an error."""

    def __init__(self, passes: BackwardPasses):
        self._passes: BackwardPasses | None = passes
        self.graph_task = torch._C._current_graph_task_id()
        _running[id(self)] = weakref.ref(self)

    def __call__(self) -> None:
        passes = self._leave()
        assert passes is not None
        passes._end = None
        try:
            passes.publish()
        except BaseException:
            passes.abandon()
            raise

    def fail(self) -> None:
        """End the pass in an error, once."""
        passes = self._leave()
        if passes is not None:
            passes.abandon()

    def _leave(self) -> BackwardPasses | None:
        """The passes, at the first call."""
        _running.pop(id(self), None)
        passes, self._passes = self._passes, None
        return passes

    def __del__(self) -> None:
        self.fail()


_running: dict[int, weakref.ref[_End]] = {}
"""Process-wide: the ends of the passes that run, of all models and threads, by their id."""


def _fail_here() -> None:
    """End the passes in which a backward function raises now."""
    task = torch._C._current_graph_task_id()
    for reference in list(_running.values()):
        end = reference()
        if end is not None and end.graph_task == task:
            end.fail()


at_backward_errors(_fail_here)


def several_backward_passes(what: str) -> str:
    """Why gradients of one forward pass may be written once."""
    return (
        f"a second backward pass of one forward pass adds to the gradient of {what}, which would "
        "make it depend on how the batch was cut. Add the losses and call backward() once, or do "
        "the forward pass again."
    )


def several_forward_passes(what: str) -> str:
    """Why a parameter or a model may take part in one backward pass only once."""
    return (
        f"{what} took part in several forward passes, or several times in one, that go backward "
        "together, which would make gradients depend on how the batch was cut. Call backward() "
        "for each; gradients add up."
    )


def accumulates_gradient(ctx: Any, parameter: Tensor) -> bool | None:
    """True if this backward pass adds to `parameter.grad`, False if it returns the gradient from
    `torch.autograd.grad`, None if it needs no gradient of the parameter."""
    if not parameter.requires_grad:  # frozen since the forward pass
        return None
    for node, _ in ctx.next_functions:
        if getattr(node, "variable", None) is parameter:
            return adds_to_gradient(node)
    return False


def adds_to_gradient(node: Any) -> bool | None:
    """`accumulates_gradient` of a trained parameter whose gradient goes to `node` of autograd."""
    try:
        return torch._C._will_engine_execute_node(node) or None
    except RuntimeError:  # torch's answer for a leaf that autograd.grad asks for
        return False
