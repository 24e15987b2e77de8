"""g <- g + sum_t outer(dy_t, x_t): parameter gradients as a left fold over tokens.

Shapes: `fold_outer`: g [N, K], dy [T, N], x [T, K]. `fold_columns`: g [C], rows [R, C].
    `fold_rows`: g [V, C], index [T], rows [T, C].
Dtypes and rounding points: operands fp32, bf16 or fp16; exact products; g is fp32, or fp64 where
    `accumulator_dtype` says so; `parameter.grad` is rounded once to fp32.
Order: ORDER below, `gradient_fold`.
Invariant to: where the tokens are cut into calls, if every cut falls on a multiple of 16.
Varies with: the order of the tokens.
Backward: none.
Errors: ValueError on a `parameter.grad` that `GradientBuffer` did not fold; on CUDA TypeError on
    operands of two dtypes.
Cost: one rank-16 update of g per 16 tokens; on a GPU g is read and written once per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from rl_consistency.kernels.core.operand import aligned, require_operands
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.gradient_fold import columns_triton as gradient_columns_triton
from rl_consistency.kernels.gradient_fold import outer_triton as gradient_fold_triton
from rl_consistency.kernels.gradient_fold.rows_triton import gradient_fold_rows
from rl_consistency.kernels.matmul.cublaslt import outer_from_zero
from rl_consistency.kernels.reduction.tree_sum import tree_sum

STEP = 16
"""Tokens in one step of the fold. In the packed layout sequences start on a multiple of it."""

ORDER = ReductionOrder(
    id="gradient_fold",
    version=3,
    cpu="""\
for each 16 tokens, upward, with zeros after a short last step:
    matrix (fp32): g = addmm(g, dy_step^T, x_step), one call of the matrix library
    vector (fp64): g += halving tree over the step's rows, in fp32
for each token t, upward:
    embedding (fp32): g[index[t]] += rows[t]
at the end of a call on a matrix: g += 0, which turns -0 into +0
parameter.grad = fp32(the buffers of all places of the parameter, added in the order of the places)
""",
    cuda="""\
for each 16 tokens, upward, with zeros after a short last step:
    matrix of bf16 or fp16 operands (fp32): g = one step of the matrix unit on g
        (m16n8k16, or wgmma with k16), g being the accumulator
    matrix of fp32 operands (fp64): g += fp32 sum of the 16 products, from zero, by fused
        multiply-adds
    vector (fp64): g += halving tree over the step's rows, in fp32
for each token t, upward:
    embedding (fp32; fp64 for an fp32 parameter): g[index[t]] += rows[t]
at the end of a call on a matrix: g += 0, which turns -0 into +0
parameter.grad = fp32(the buffers of all places of the parameter, added in the order of the places)
""",
)


def fold_outer(buffer: Tensor, dy: Tensor, x: Tensor, *, fresh: bool = False) -> None:
    """Continue `buffer` [N, K] (fp32, in place) over the tokens of dy [T, N] and x [T, K].

    A `fresh` buffer counts as all zero. On CUDA fp32 operands take an fp64 buffer; an fp32 one
    would be rounded at the end of every call.
    """
    if buffer.is_cuda:
        require_operands("gradient_fold", dy=dy, x=x)
        if not (fresh and outer_from_zero(dy, x, buffer)):
            gradient_fold_triton.gradient_fold_outer(buffer, dy, x, fresh)
        return
    if fresh:
        buffer.zero_()
    dy, x = _whole_steps(dy), _whole_steps(x)
    for dy_step, x_step in zip(dy.split(STEP), x.split(STEP), strict=True):
        buffer.addmm_(dy_step.t(), x_step)
    # A step of padding turns -0 (an underflowed product) into +0. Adding 0 gives the same bits
    # without padding.
    buffer.add_(0.0)


def fold_columns(buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1) -> None:
    """Continue `buffer` [C] (fp64 or fp32, in place) over rows [T * rows_per_token, C]."""
    if buffer.is_cuda:
        gradient_columns_triton.gradient_fold_columns(buffer, rows, rows_per_token)
        return
    step = STEP * rows_per_token
    rows = _whole_steps(rows, step)
    fold_step_sums(buffer, tree_sum(rows.view(-1, step, rows.shape[1]), dim=1))


def fold_step_sums(buffer: Tensor, sums: Tensor) -> None:
    """Continue `buffer` [C] (fp64 or fp32, in place) over its steps' fp32 sums [S, C].

    The caller has added the rows of each step by the halving tree.
    """
    if buffer.is_cuda:
        gradient_columns_triton.fold_step_sums(buffer, sums)
        return
    for partial in sums.unbind(0):
        buffer.add_(partial)


def fold_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """Continue `buffer` [V, C] (fp32 or fp64, in place): row index[t] += rows[t], t upward; an
    index of -1 skips a row."""
    if buffer.is_cuda:
        gradient_fold_rows(buffer, index, rows)
        return
    kept = index >= 0
    buffer.index_add_(0, index[kept], rows[kept].float())


def _whole_steps(rows: Tensor, step: int = STEP) -> Tensor:
    return aligned(F.pad(rows.float(), (0, 0, 0, -rows.shape[0] % step)).contiguous())


class GradientBuffer:
    """The accumulator of one use of one parameter: fp32 or fp64 (`accumulator_dtype`).

    A caller that gets a fresh `accumulator` must `commit` it, even if the fold fails.

    A parameter with an fp32 accumulator and one use is folded directly into `parameter.grad`. Any
    other parameter has one buffer per use (tied embeddings have two), so that the fold of one use
    does not interrupt another. After every backward pass, `parameter.grad` is the sum of the
    buffers in the order of the uses. `optimizer.zero_grad()` resets them. The first use continues a
    gradient that existed before the first fold.
    """

    def __init__(self, parameter: nn.Parameter, siblings: list[GradientBuffer] | None = None):
        self.parameter = parameter
        self._siblings = [] if siblings is None else siblings
        self._siblings.append(self)
        self._in_place = siblings is None and accumulator_dtype(parameter) == torch.float32
        self._own: Tensor | None = None
        # Weak, so that a gradient the optimizer has dropped leaves memory.
        self._published: tuple[TensorWeakRef, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without a fold, since a copied parameter has no gradient."""
        return self.__dict__ | {"_own": None, "_published": None}

    @classmethod
    def beside_autograd(cls, parameter: nn.Parameter) -> GradientBuffer:
        """A buffer that folds directly into `parameter.grad`, where autograd also adds."""
        buffer = cls(parameter)
        buffer._in_place = True
        return buffer

    @classmethod
    def for_uses(cls, parameter: nn.Parameter, count: int) -> list[GradientBuffer]:
        """One buffer per use, in the order in which their sum adds them."""
        if count == 1:
            return [cls(parameter)]
        siblings: list[GradientBuffer] = []
        return [cls(parameter, siblings) for _ in range(count)]

    def accumulator(self, *, zeroed: bool = True) -> tuple[Tensor, bool]:
        """The tensor to continue, of the parameter's shape, and whether it is fresh.

        Args:
            zeroed: whether a fresh one holds zeros; otherwise it is uninitialized.

        Raises:
            ValueError: `parameter.grad` is not fp32, or was changed between two backward passes.
        """
        parameter = self.parameter
        gradient = parameter.grad
        if gradient is None:
            return self._first(zeroed), True
        if gradient.dtype != torch.float32:
            raise ValueError(
                f"the gradient present is {gradient.dtype}; the fold continues fp32 only. "
                "Call optimizer.zero_grad(set_to_none=True) after patch()."
            )
        if self._in_place:
            return gradient, False
        self._check_published(gradient)
        fresh = self._own is None
        if self._own is None:
            self._own = _filled(parameter, accumulator_dtype(parameter), zeroed)
        return self._own, fresh

    def _first(self, zeroed: bool) -> Tensor:
        """The accumulator of a parameter that has no gradient yet."""
        parameter = self.parameter
        self._start_afresh()
        parameter.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
        if self._in_place:
            parameter.grad = _filled(parameter, torch.float32, zeroed)
            return parameter.grad
        own = _filled(parameter, accumulator_dtype(parameter), zeroed)
        # `commit` writes every element.
        parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
        self._own = own
        return own

    def commit(self) -> None:
        """Publish the sum of all uses as `parameter.grad`."""
        if self._in_place:
            return
        gradient = self.parameter.grad
        assert gradient is not None
        first, *others = [b._own for b in self._siblings if b._own is not None]
        if first.dtype == gradient.dtype:
            # An embedding table is large: this takes no temporary and few passes.
            torch.add(first, others.pop(0) if others else 0.0, out=gradient)
            for other in others:
                gradient.add_(other)
        else:
            for other in others:
                first = first + other
            gradient.copy_(first)
        self._stamp(gradient)

    def _start_afresh(self) -> None:
        for buffer in self._siblings:
            buffer._own = None
            buffer._published = None

    def _check_published(self, gradient: Tensor) -> None:
        published = self._published
        if published is None:
            self._start_afresh()
            if gradient.any():
                self._siblings[0]._own = gradient.to(accumulator_dtype(self.parameter), copy=True)
            self._stamp(gradient)
        elif published[0]() is not gradient or published[1] != gradient._version:
            if gradient.any():
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(gradient.shape)} was changed "
                    "between two backward passes, so the fold cannot be continued. Scale or clip "
                    "only after the last backward pass, call optimizer.zero_grad() before the "
                    "next, and keep one strict(...) choice for all micro-batches of a step."
                )
            self._start_afresh()
            self._stamp(gradient)

    def _stamp(self, gradient: Tensor) -> None:
        for buffer in self._siblings:
            buffer._published = (TensorWeakRef(gradient), gradient._version)


def _filled(parameter: Tensor, dtype: torch.dtype, zeroed: bool) -> Tensor:
    return (torch.zeros_like if zeroed else torch.empty_like)(parameter, dtype=dtype)


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """fp64 for vectors and, on CUDA, fp32 parameters, since thousands of steps in fp32 would lose
    digits; otherwise fp32."""
    wide = parameter.dim() == 1 or (parameter.is_cuda and parameter.dtype == torch.float32)
    return torch.float64 if wide else torch.float32


def fold_parameter(
    parameter: Tensor,
    buffer: GradientBuffer | None,
    fold: Callable[[Tensor, bool], None],
    *,
    overwrites: bool = False,
) -> Tensor | None:
    """Fold the tokens of one call and return the parameter's gradient for autograd.

    With a buffer, the fold continues it and autograd gets None. Without one, the fold starts from
    zero and autograd gets the result in the parameter's dtype.

    Args:
        fold: called with the accumulator and whether it is fresh.
        overwrites: whether `fold` writes every element of a fresh accumulator.
    """
    if buffer is None:
        make = torch.empty_like if overwrites else torch.zeros_like
        gradient = make(parameter, dtype=accumulator_dtype(parameter))
        fold(gradient, True)
        return gradient.to(parameter.dtype)
    accumulator, fresh = buffer.accumulator(zeroed=not overwrites)
    try:
        fold(accumulator, fresh)
    except BaseException:
        if fresh:
            accumulator.zero_()
            buffer.commit()
        raise
    buffer.commit()
    return None
