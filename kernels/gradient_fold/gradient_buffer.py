"""A parameter's gradient as a fold that goes on over backward passes.

To autograd it is an ordinary gradient: the backward pass hands it over in the parameter's
`grad_dtype`, then autograd writes `.grad` and calls every hook once.

Shapes: those of the parameter.
Dtypes and rounding points: `accumulator_dtype` inside; one rounding to `parameter.grad_dtype`.
Order: that of `gradient_fold`; the accumulators of all uses are added in the order of the uses.
Errors: ValueError on a gradient that was changed between two passes, on one that a failed pass has
    left, and on several forward passes that go backward together.
Cost: where accumulator and gradient have one dtype and the parameter has one use, they are one
    tensor. Otherwise the accumulators live as long as the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import TensorWeakRef

Fold = Callable[[Tensor, bool], None]
"""Continues an accumulator; a fresh one counts as zero, whatever it holds."""


class GradientBuffer:
    """One use of one parameter; tied weights have several, so that no use interrupts another.

    In a backward pass every use folds once: the first hands autograd the gradient, the others
    complete it before autograd reads it. The next pass continues it, and a gradient that was there
    before the first pass too. So a tensor hook sees the sum of all passes since `zero_grad`.
    """

    def __init__(self, parameter: nn.Parameter):
        self._gradient, self._use = _Gradient(parameter, 1), 0

    @classmethod
    def for_uses(cls, parameter: nn.Parameter, count: int) -> list[GradientBuffer]:
        """One buffer per use, in the order in which their sum adds them."""
        buffers: list[GradientBuffer] = [cls(parameter) for _ in range(count)]
        shared = _Gradient(parameter, count)
        for use, buffer in enumerate(buffers):
            buffer._gradient, buffer._use = shared, use
        return buffers

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter whose gradient this is."""
        return self._gradient.parameter

    def fold(self, ctx: Any, fold: Fold, *, overwrites: bool) -> Tensor | None:
        """What a backward function returns for the parameter; see `fold_parameter`."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # what was folded before is no part of a graph
        return self._gradient.fold(self._use, ctx, fold, overwrites)


class _Left(NamedTuple):
    """What a pass leaves on the gradient itself, so that it goes when the gradient goes."""

    accumulators: list[Tensor | None]
    version: int
    """Of the gradient; -1 if a hook changed it."""


class _Gradient:
    """The gradient of one parameter: an accumulator per use, and the pass that goes on."""

    def __init__(self, parameter: nn.Parameter, uses: int):
        self.parameter, self.uses = parameter, uses
        self._published = False
        """Whether an earlier pass has left a gradient."""
        self._forget()

    def __getstate__(self) -> tuple[nn.Parameter, int]:
        """A copy starts without a fold, since a copied parameter has no gradient."""
        return self.parameter, self.uses

    def __setstate__(self, state: tuple[nn.Parameter, int]) -> None:
        self.__init__(*state)

    def fold(self, use: int, ctx: Any, fold: Fold, overwrites: bool) -> Tensor | None:
        """See `fold_parameter`."""
        accumulates = _accumulates(ctx, self.parameter)
        if accumulates is None:
            return None
        first = torch._C._current_graph_task_id() != self._task
        if first:
            self._begin(accumulates)
        self._require_unfolded(use)
        accumulator, fresh = self._accumulators[use], False
        if accumulator is None:
            accumulator, fresh = _filled(self.parameter, zeroed=not overwrites), True
        fold(accumulator, fresh)
        self._folded.add(use)
        if accumulates:
            self.parameter.grad = None
        gradient = self._sum(use, accumulator, first)
        self._handed = TensorWeakRef(gradient), gradient.data_ptr(), gradient._version
        return gradient if first else None

    def _begin(self, accumulates: bool) -> None:
        """Start a pass: on `parameter.grad`, or on nothing."""
        carried = self._carried(self.parameter.grad if accumulates else None)
        self._forget()
        self._task, self._accumulators = torch._C._current_graph_task_id(), carried
        self._unfinished = accumulates
        end = self._publish if accumulates else self._forget
        Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportAttributeAccessIssue]

    def _carried(self, gradient: Tensor | None) -> list[Tensor | None]:
        """The accumulators that a gradient is the sum of."""
        fresh: list[Tensor | None] = [None] * self.uses
        if gradient is None:
            self._published = False
            return fresh
        left: _Left | None = getattr(gradient, "_left_by_fold", None)
        in_place = self._in_place()
        changed = self._published and not in_place
        if left is not None:
            changed = left.version != gradient._version
        if changed or self._unfinished:
            self._require_zeros(gradient)
            return fresh
        if left is not None:
            return list(left.accumulators)
        wide = accumulator_dtype(self.parameter)
        return [gradient if in_place else gradient.to(wide, copy=True), *fresh[1:]]

    def _require_zeros(self, gradient: Tensor) -> None:
        if not gradient.any():
            return
        if self._unfinished:
            found = "is left by a backward pass that ended in an error"
        else:
            found = "was changed between two backward passes"
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} {found}, so the fold "
            "cannot be continued. Call optimizer.zero_grad() and do all micro-batches of the step "
            "again. Scale or clip only after the last one (a hook that returns another gradient "
            "does it in each), and keep one strict(...) choice for all."
        )

    def _require_unfolded(self, use: int) -> None:
        if use in self._folded:
            raise ValueError(
                f"a parameter of shape {tuple(self.parameter.shape)} took part in several forward "
                "passes that go backward together, which would make its gradient depend on how the "
                "batch was cut. Call backward() once per forward pass; gradients add up."
            )

    def _sum(self, use: int, accumulator: Tensor, first: bool) -> Tensor:
        """The gradient of all uses so far; the tensor of the pass's first use again."""
        if self._in_place():
            # Autograd keeps it without a copy if nothing else refers to it.
            self._accumulators[use] = None
            return accumulator
        self._accumulators[use] = accumulator
        dtype = _gradient_dtype(self.parameter)
        gradient = torch.empty_like(self.parameter, dtype=dtype) if first else self._handed[0]()
        assert gradient is not None
        parts = [part for part in self._accumulators if part is not None]
        if len(parts) > 1 and parts[0].dtype == dtype:
            # An embedding table is large: this takes no temporary and few passes.
            torch.add(parts[0], parts[1], out=gradient)
            for part in parts[2:]:
                gradient.add_(part)
            return gradient
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return gradient.copy_(total)

    def _publish(self) -> None:
        """End a pass: leave the accumulators with the gradient that autograd has written."""
        gradient = self.parameter.grad
        if gradient is not None:
            handed, address, version = self._handed
            kept = gradient.data_ptr() == address and gradient._version == version
            if not kept and (own := handed()) is not None:  # somebody refers to ours: a copy
                kept = own._version == version and torch.equal(own, gradient)
            if not (kept and self._in_place()):
                left = _Left(self._accumulators, gradient._version if kept else -1)
                gradient._left_by_fold = left  # pyright: ignore[reportAttributeAccessIssue]
            self._published = True
        self._forget()

    def _forget(self) -> None:
        self._task, self._unfinished = -1, False
        self._accumulators: list[Tensor | None] = [None] * self.uses
        self._folded: set[int] = set()
        self._handed: tuple[Any, int, int] = (lambda: None, 0, 0)

    def _in_place(self) -> bool:
        """Whether accumulator and gradient are one tensor."""
        return self.uses == 1 and accumulator_dtype(self.parameter) == _gradient_dtype(
            self.parameter
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
    gradient = _filled(parameter, zeroed=not overwrites)
    fold(gradient, True)
    return gradient.to(_gradient_dtype(parameter))


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """fp64 for vectors and, on CUDA, fp32 parameters, since thousands of steps in fp32 would lose
    digits; otherwise fp32."""
    wide = parameter.dim() == 1 or (parameter.is_cuda and parameter.dtype == torch.float32)
    return torch.float64 if wide else torch.float32


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    """`parameter.grad_dtype`; a compiler cannot read it and takes torch's default."""
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # pyright: ignore[reportAttributeAccessIssue]


def _filled(parameter: Tensor, *, zeroed: bool) -> Tensor:
    make = torch.zeros_like if zeroed else torch.empty_like
    return make(parameter, dtype=accumulator_dtype(parameter))


def _accumulates(ctx: Any, parameter: Tensor) -> bool | None:
    """True if this backward pass adds to `parameter.grad`, False if it returns the gradient from
    `torch.autograd.grad`, None if it needs no gradient of the parameter."""
    for node, _ in ctx.next_functions:
        if getattr(node, "variable", None) is parameter:
            try:
                return torch._C._will_engine_execute_node(node) or None
            except RuntimeError:  # torch's answer for a leaf that autograd.grad asks for
                return False
    return False
