"""A parameter's gradient as a fold that goes on over backward passes.

To autograd it is an ordinary gradient: the backward pass hands over the sum of all passes in the
parameter's `grad_dtype`, then autograd writes `.grad` and calls every hook once. A `.grad` that was
there stays the same tensor.

Of the backward passes of one model one runs at a time. It begins with the first gradient that is
folded in it and ends when autograd calls back. One within another, as reentrant checkpointing makes
them, belongs to the outer one.

Shapes: those of the parameter.
Dtypes and rounding points: `accumulator_dtype` inside; one rounding to `parameter.grad_dtype`.
Order: that of `gradient_fold`; the accumulators of all uses are added in the order of the uses.
Varies with: what others write into `.grad` between two passes; the fold goes on from there.
Errors: ValueError on a hook that changes the gradient of one of several passes, on a gradient that
    a failed pass has left, on several forward passes that go backward together, and on several
    backward passes of one forward pass that add to it.
Cost: where accumulator and gradient have one dtype and the parameter has one use and no hook, they
    are one tensor. Otherwise the accumulators live as long as the gradient, and a pass that
    continues one reads both.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from rl_consistency.kernels.core.autograd import at_backward_errors
from rl_consistency.kernels.gradient_fold.resume_triton import Resumed, resume_accumulators

Fold = Callable[[Tensor, bool], None]
"""Continues an accumulator; a fresh one counts as zero, whatever it holds."""

_LEFT = "_left_by_fold"
"""The attribute of a gradient that keeps what the fold goes on from."""

_GATHERED = "_gradient_buffers"
"""The attribute of a gathered parameter that keeps its buffers."""

FAILED = "is left by a backward pass that ended in an error"
WRITTEN = "was written or replaced while a backward pass was between two of its uses,"
HOOKED = "was changed by a hook, or by a term beside the patched forward,"


class ForwardPass:
    """What the backward passes of one forward pass leave behind."""

    wrote = False
    """Whether one of them has written gradients of parameters."""


class BackwardPasses:
    """Which pass runs, and what takes part in it."""

    def __init__(self) -> None:
        self.gradients: weakref.WeakSet[_Gradient] = weakref.WeakSet()
        """All that are told of passes which end in an error."""
        self._folded: list[_Gradient] = []
        self._forward: ForwardPass | None = None
        """The forward pass that goes backward in the pass that runs."""
        self._writes = False
        """Whether the pass that runs writes gradients of parameters."""
        self._resumed = False
        """Whether `resume_once` was called in the pass that runs."""
        self._latest = -1
        """The number that autograd gave the op which folded last."""
        self._end: weakref.ref[_End] | None = None
        """End of the pass that runs. Autograd alone holds it, so that it is gone after an error."""
        self._closed = False

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
        self._folded, self._forward, self._writes, self._resumed = [], None, False, False
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
        if other and any(gradient.parameter.requires_grad for gradient in self.gradients):
            raise ValueError(several_forward_passes("the model"))
        self._forward = forward

    def resume_once(self) -> None:
        """At the first call in a pass make the accumulators of all gradients fit them, in few
        launches."""
        gradients = [] if self._resumed else list(self.gradients)
        self._resumed = True
        found = [each for gradient in gradients if (each := gradient.resumable()) is not None]
        resume_accumulators(each for _, each in found)
        for left, each in found:
            left.resumed = each.gradient._version

    def add(self, gradient: _Gradient, writes: bool) -> None:
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
        for gradient in list(self.gradients):
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


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """fp64 for vectors and, on CUDA, fp32 parameters, since thousands of steps in fp32 would lose
    digits; otherwise fp32."""
    wide = parameter.dim() == 1 or (parameter.is_cuda and parameter.dtype == torch.float32)
    return torch.float64 if wide else torch.float32


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """`parameter.grad_dtype`; a compiler cannot read it and takes torch's default."""
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # pyright: ignore[reportAttributeAccessIssue]


def filled(parameter: Tensor, *, zeroed: bool) -> Tensor:
    """A new accumulator, all zero or not written yet."""
    make = torch.zeros_like if zeroed else torch.empty_like
    return make(parameter, dtype=accumulator_dtype(parameter))


def add_up(accumulators: list[Tensor | None], out: Tensor) -> Tensor:
    """out <- the sum of the accumulators, in their order and dtype, rounded once."""
    first, *others = (part for part in accumulators if part is not None)
    if not others or first.dtype != out.dtype:
        return out.copy_(sum(others, first))
    # An embedding table is large: this takes no temporary and few passes.
    torch.add(first, others[0], out=out)
    for part in others[1:]:
        out.add_(part)
    return out


class GradientBuffer:
    """One use of one parameter; tied weights have several, so that no use interrupts another.

    In a backward pass every use folds once, and the last one hands autograd the gradient: the sum
    of all passes since `zero_grad`, which is what a tensor hook sees.
    """

    def __init__(self, parameter: nn.Parameter, shared: _Gradient | None = None, use: int = 0):
        self._gradient, self._use = shared or _Gradient(parameter, 1, BackwardPasses()), use

    @classmethod
    def for_uses(
        cls, parameter: nn.Parameter, count: int, passes: BackwardPasses | None = None
    ) -> list[GradientBuffer]:
        """One buffer per use, in the order in which their sum adds them.

        Parameters of one model share its `passes`.
        """
        shared = _Gradient(parameter, count, passes or BackwardPasses())
        return [cls(parameter, shared, use) for use in range(count)]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter whose gradient this is."""
        return self._gradient.parameter

    def of(self, gathered: nn.Parameter) -> GradientBuffer:
        """The buffer of the same use of the tensor that a sharded parameter is gathered into.

        Its gradient is fp32, whatever its dtype.
        """
        buffers: list[GradientBuffer] | None = vars(gathered).get(_GATHERED)
        if buffers is None:
            gathered.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
            kept = self._gradient
            buffers = GradientBuffer.for_uses(gathered, kept.uses, kept.passes)
            setattr(gathered, _GATHERED, buffers)
        return buffers[self._use]

    def fold(self, ctx: Any, fold: Fold, *, overwrites: bool) -> Tensor | None:
        """What a backward function returns for the parameter; see `fold_parameter`."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # what was folded before is no part of a graph
        if self._gradient.captured is not None:
            fold(self._gradient.captured, False)
            return None
        accumulates = accumulates_gradient(ctx, self.parameter)
        if accumulates is None:
            return None
        accumulator = self.begin(ctx._sequence_nr(), accumulates)
        fresh = accumulator is None
        if accumulator is None:
            accumulator = filled(self.parameter, zeroed=not overwrites)
        fold(accumulator, fresh)
        return self.finish(accumulator)

    @property
    def uses(self) -> int:
        """How many uses the parameter has."""
        return self._gradient.uses

    @contextmanager
    def folding_into(self, accumulator: Tensor) -> Iterator[None]:
        """Inside the block, folds continue this accumulator and hand nothing over. A CUDA graph
        captured there does so in each replay, which comes between `begin` and `finish`."""
        self._gradient.captured = accumulator
        try:
            yield
        finally:
            self._gradient.captured = None

    def begin(self, op: int, accumulates: bool) -> Tensor | None:
        """The accumulator that a pass continues, None where it starts from zero; `op` as autograd
        numbers it, `accumulates` as `adds_to_gradient` tells."""
        self._gradient._op = op
        self._gradient._enter(self._use, accumulates)
        return self._gradient._accumulators[self._use]

    def finish(self, accumulator: Tensor) -> Tensor | None:
        """What a backward function returns for the parameter once its use is folded."""
        return self._gradient.finish(self._use, accumulator)


class _Left:
    """What a pass leaves on the gradient itself, so that it goes when the gradient goes."""

    def __init__(self, accumulators: list[Tensor | None], fault: str = "", version: int = -1):
        self.accumulators, self.fault, self.version = accumulators, fault, version
        self.resumed = -1
        """Version of the gradient that the accumulators fit, in the pass that runs."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a saved gradient is a plain tensor, with an attribute that says nothing.
        return OrderedDict, ()


class _Gradient:
    """The gradient of one parameter: an accumulator per use, and the pass that goes on."""

    def __init__(self, parameter: nn.Parameter, uses: int, passes: BackwardPasses):
        self.parameter, self.uses, self.passes = parameter, uses, passes
        self.captured: Tensor | None = None
        passes.gradients.add(self)
        self._forget()

    def __getstate__(self) -> tuple[nn.Parameter, int]:
        """A copy starts without a fold, since a copied parameter has no gradient."""
        return self.parameter, self.uses

    def __setstate__(self, state: tuple[nn.Parameter, int]) -> None:
        self.__init__(*state, BackwardPasses())

    @property
    def name(self) -> str:
        """What errors call the parameter."""
        return f"a parameter of shape {tuple(self.parameter.shape)}"

    def finish(self, use: int, accumulator: Tensor) -> Tensor | None:
        self._accumulators[use] = accumulator
        self._folded.add(use)
        return self._handed() if len(self._folded) == self.uses else None

    def _enter(self, use: int, accumulates: bool) -> None:
        self.passes.enter(self._op)
        if not self._folded:
            self._accumulates = accumulates
            if accumulates:
                self._continue(self.parameter.grad)
            self.passes.add(self, accumulates)
        elif use in self._folded or accumulates != self._accumulates:
            raise ValueError(several_forward_passes(self.name))

    def _continue(self, gradient: Tensor | None) -> None:
        """Take the accumulators that a gradient is the sum of."""
        # A hook may change what it is given, which the accumulator has to survive.
        self._hooked = bool(self.parameter._backward_hooks)
        one = self.uses == 1 and not self._hooked
        self._in_place = one and accumulator_dtype(self.parameter) == gradient_dtype(self.parameter)
        if gradient is None:
            return
        if self.passes.again and bool(gradient.any()):
            raise ValueError(
                "a second backward pass of one forward pass adds to the gradient of "
                f"{self.name}, which would make it depend on how the batch was cut. Add the "
                "losses and call backward() once, or do the forward pass again."
            )
        left = getattr(gradient, _LEFT, None) or _Left([])
        touched = gradient._version != left.version
        self._adds = not (self._hooked or left.fault) or not touched or bool(gradient.any())
        if left.fault and self._adds:
            raise ValueError(self._not_continued(left.fault))
        self._in_place = self._in_place and gradient.is_contiguous()
        if self._in_place:
            self._accumulators[0] = gradient
        elif len(left.accumulators) == self.uses and not left.fault:
            self._accumulators = self._resumed(left, gradient)
        else:
            self._accumulators[0] = filled(self.parameter, zeroed=False).copy_(gradient)
        if hasattr(gradient, _LEFT):
            delattr(gradient, _LEFT)
        self._before, self._version = gradient, gradient._version

    def _resumed(self, left: _Left, gradient: Tensor) -> list[Tensor | None]:
        """The accumulators of `.grad`; where it was changed since, they are what it is now."""
        self.passes.resume_once()
        if left.resumed == gradient._version:
            return left.accumulators
        same = add_up(left.accumulators, torch.empty_like(gradient)) == gradient
        found: list[Tensor | None] = []
        changed: Tensor | float = gradient
        for part in left.accumulators:
            found.append(None if part is None else torch.where(same, part, changed))
            changed = changed if part is None else 0.0
        return found

    def resumable(self) -> tuple[_Left, Resumed] | None:
        """What a kernel can resume on the current device before the gradient is folded."""
        gradient = self.parameter.grad
        left = getattr(gradient, _LEFT, None)
        if left is None or gradient is None:
            return None
        left.resumed = -1
        parts = [part for part in left.accumulators if part is not None]
        if not gradient.is_cuda or not 1 <= len(parts) <= 2:
            return None
        # A graph would copy the kernel's table again, from memory that is gone when it is replayed.
        captured = torch.cuda.is_current_stream_capturing()
        if captured or gradient.device.index != torch.cuda.current_device():
            return None
        found = Resumed(gradient, *parts)
        return (left, found) if found.fits else None

    def _handed(self) -> Tensor:
        """What autograd gets: a tensor that nothing else refers to, which it keeps as it is."""
        before, only = self._before, self._accumulators[0]
        if self._in_place:
            assert only is not None
            self._accumulators[0] = None
            return only if before is None else self._lent(before)
        if self._written_beside:
            raise ValueError(self._not_continued(WRITTEN))
        dtype = gradient_dtype(self.parameter)
        if before is not None and not self._hooked:
            of_autograd = dtype, self.parameter.shape, self.parameter.stride()
            if (before.dtype, before.shape, before.stride()) == of_autograd:
                return self._lent(add_up(self._accumulators, before))
        if only is not None and self.uses == 1:
            gradient = only.to(dtype, copy=True)
        else:
            gradient = add_up(self._accumulators, torch.empty_like(self.parameter, dtype=dtype))
        if before is not None:
            # Autograd adds to it; hooks and other terms of the loss may fail until then.
            self._ready = before.zero_()._version
        return gradient

    @property
    def _written_beside(self) -> bool:
        """Whether `.grad` was written or replaced since the pass has read it."""
        before = self._before
        if before is None or self.parameter.grad is not before:
            return before is not None
        # Gradients that are parts of one buffer share its version.
        alone = before.untyped_storage().nbytes() == before.nbytes
        return alone and before._version != self._version

    def _lent(self, gradient: Tensor) -> Tensor:
        """`.grad` for autograd to put back as it is; adding to it would take two passes more."""
        self._ready = gradient._version
        self.parameter.grad = None
        return gradient.detach()

    def publish(self) -> str:
        """End a pass: leave the accumulators with the gradient that autograd has written. Returns
        what is wrong with it, or nothing."""
        if len(self._folded) < self.uses and (error := self._complete()):
            return error
        error = ""
        gradient, before = self.parameter.grad, self._before
        if self._accumulates and gradient is not None:
            alias = before is not None and gradient.data_ptr() == before.data_ptr()
            # A view of other memory was put there on purpose, as DDP puts its buckets.
            stays = before is not None and (alias or not gradient._is_view())
            # ZeRO-3 has emptied the parameter by now, which then takes no other gradient.
            if before is not None and stays and before.shape == self.parameter.shape:
                if not alias:
                    before.copy_(gradient)
                gradient = self.parameter.grad = before
            left = _Left(self._accumulators)
            if self._hooked:
                own = add_up(left.accumulators, gradient.clone())
                if not torch.equal(*(x.contiguous().view(torch.uint8) for x in (own, gradient))):
                    left = _Left([], HOOKED)
                    error = self._not_continued(HOOKED) if self._adds else ""
            if left.fault or not self._in_place:
                setattr(gradient, _LEFT, left)
        self._forget()
        return error

    def _complete(self) -> str:
        """Hand over the gradient of some uses, where the loss did not depend on the others."""
        hooks = self.parameter._backward_hooks or self.parameter._post_accumulate_grad_hooks
        beside = self._written_beside or hooks
        if self._accumulates and not beside:
            torch.autograd.backward(self.parameter, self._handed())
            return ""
        return (
            f"the loss depends on {len(self._folded)} of the {self.uses} uses of {self.name}, "
            "which torch.autograd.grad and parameters with hooks or other terms of the loss do not "
            "cover. Call backward() for these terms alone, remove the hooks, and read .grad."
        )

    def abandon(self, lost: bool, latest: int) -> None:
        """Mark what a failed pass has left, though this gradient may be no part of it.

        `lost`: gradients of parameters were being written. `latest`: the op that folded last;
        autograd owns what the other ops returned.
        """
        version, before, given_now = self._ready, self._before, self._op == latest
        self._forget()
        gradient = self.parameter.grad
        # Autograd has put back an alias, or has not taken it yet. Without a gradient later on, the
        # caller has removed it.
        if gradient is None:
            lent = given_now
        else:
            lent = before is not None and gradient.data_ptr() == before.data_ptr()
        if lost and lent and version >= 0:
            gradient = self.parameter.grad = before
        if lost and gradient is not None:
            setattr(gradient, _LEFT, _Left([], FAILED, version))

    def _forget(self) -> None:
        self._accumulates = False
        """Whether the pass adds to `.grad`."""
        self._adds = False
        """Whether there is anything that it adds to."""
        self._accumulators: list[Tensor | None] = [None] * self.uses
        self._folded: set[int] = set()
        self._before: Tensor | None = None
        """`.grad` as it was before the pass."""
        self._op = -1
        """The number that autograd gave the op which folded last."""
        self._version = self._ready = -1
        """Versions of `.grad`: before the pass, and once its values are in what autograd takes."""
        self._hooked = self._in_place = False

    def _not_continued(self, fault: str) -> str:
        return (
            f"the gradient of {self.name} {fault} so the fold cannot be continued. Call "
            "optimizer.zero_grad() and do all micro-batches of the step again, in one backward "
            "pass if a hook changes gradients."
        )


def fold_parameter(
    ctx: Any,
    parameter: Tensor,
    buffer: GradientBuffer | None,
    fold: Fold,
    *,
    overwrites: bool = False,
) -> Tensor | None:
    """Fold the tokens of one call; the gradient that a backward function returns to autograd.

    Without a buffer the fold starts from zero, and autograd adds the results of several calls.

    Args:
        ctx: autograd's context of the function, which had the parameter as an input.
        parameter: the input.
        buffer: of the parameter.
        fold: folds the tokens.
        overwrites: whether `fold` writes every element of a fresh accumulator.
    """
    if buffer is not None:
        return buffer.fold(ctx, fold, overwrites=overwrites)
    gradient = filled(parameter, zeroed=not overwrites)
    fold(gradient, True)
    return gradient.to(gradient_dtype(parameter))
