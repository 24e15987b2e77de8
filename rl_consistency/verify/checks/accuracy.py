"""C6: the error of every canonical order against fp64 is at most that of the stock op.

The error of a result is the mean of |result - exact| / scale over its elements and the draws of a
case. The scale of an element is the root mean square of its row times that of its column, so that
neither one unlucky rounding nor one outlier channel decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rl_consistency.cases.case import TINY_SHAPES, Case, Op, OpShapes, Setting, as_tuple
from rl_consistency.cases.linear import linear_case
from rl_consistency.cases.rms_norm import rms_norm_case
from rl_consistency.cases.table import CASES, FP32_ONLY
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import case_gradients

ERROR_GROWTH_LIMIT = 1.05
"""Claim C6: our error against fp64 is at most this many times the stock op's."""

LONG_ROWS = 8192
"""Tokens of one backward pass in `long_fold_rows`."""


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """One quantity of one op: mean errors against fp64, ours and that of the stock op."""

    op: str
    dtype: str
    size: str
    quantity: str
    """An output, or `d` and the name of the operand whose gradient it is."""
    ours: float
    stock: float

    @property
    def ratio(self) -> float:
        """Our error over the stock error; 1 where both are exact."""
        if self.stock:
            return self.ours / self.stock
        return 1.0 if self.ours == 0 else float("inf")


def accuracy_rows(
    device: torch.device, dtypes: Sequence[torch.dtype], shapes: OpShapes = TINY_SHAPES
) -> list[AccuracyRow]:
    """Every op in each dtype; reductions of losses and gradients in fp32 only."""
    setups = [Setting(dtype=dtype, device=device, shapes=shapes) for dtype in dtypes]
    with numeric_settings():
        return [
            row
            for op in CASES
            for setup in setups
            if setup.dtype == torch.float32 or op not in FP32_ONLY
            for row in op_accuracy(op, setup)
        ]


def long_fold_rows(device: torch.device) -> list[AccuracyRow]:
    """fp32 parameter gradients of one backward pass over `LONG_ROWS` tokens.

    C6 does not hold for dweight of `linear` here: the fold keeps one running fp32 sum, which makes
    it independent of the cut, and its error grows with the number of steps.
    """
    setup = Setting(dtype=torch.float32, device=device)
    with numeric_settings():
        cases = linear_case(setup, 128, 128, draws=3), rms_norm_case(setup, 128, draws=3)
        found = [r for c in cases for r in _measure(setup.dtype, replace(c, count=LONG_ROWS))]
    return [row for row in found if row.quantity in ("dweight", "dbias")]


def op_accuracy(op: str, setup: Setting) -> Iterator[AccuracyRow]:
    for case in CASES[op](setup):
        if case.seeds:
            yield from _measure(setup.dtype, case)


def check_accuracy(tally: Tally, setup: Setting, op: str) -> None:
    for row in op_accuracy(op, setup):
        case = f"{row.size}, {row.quantity}"
        text = f"{row.ratio:.3f} x the stock error ({row.ours:.2e} against {row.stock:.2e})"
        tally.expect(case, row.ratio <= ERROR_GROWTH_LIMIT, text)
        if tally.figure is None or row.ratio > tally.figure:
            tally.figure = row.ratio
            if not tally.mismatches:
                tally.detail = f"largest in {case}: {text}"


def _measure(dtype: torch.dtype, case: Case) -> list[AccuracyRow]:
    """Errors of every output and of the gradient of every operand, averaged over the draws."""
    errors: dict[str, list[tuple[float, float]]] = {}
    assert case.reference is not None and case.stock is not None
    for seed in case.seeds:
        operands, dys = case.draw(case.count, seed), case.draw_dys(case.count, seed)
        wide = [x.double() if x.is_floating_point() else x for x in operands]
        exact = _results(case, case.reference, wide, dys)
        ours, stock = (_results(case, run, operands, dys) for run in (case.call, case.stock))
        for name, value in exact.items():
            pair = _error(ours[name], value), _error(stock[name], value)
            errors.setdefault(name, []).append(pair)
    known = str(torch.float32 if case.op in FP32_ONLY else dtype).removeprefix("torch.")
    row = partial(AccuracyRow, op=case.op, dtype=known, size=f"{case.count} x {case.size}")
    means = {n: [sum(side) / len(e) for side in zip(*e, strict=True)] for n, e in errors.items()}
    return [row(quantity=n, ours=ours, stock=stock) for n, (ours, stock) in means.items()]


def _results(
    case: Case, op: Op, operands: Sequence[Tensor], dys: Sequence[Tensor]
) -> dict[str, Tensor]:
    outputs, gradients = as_tuple(op(*operands)), []
    if case.gradients:
        gradients = case_gradients(case, op, operands, dys, case.gradients)
    names = *case.outputs, *(f"d{name}" for name in case.gradients)
    return dict(zip(names, (*outputs, *gradients), strict=True))


def _error(got: Tensor, exact: Tensor) -> float:
    """The mean error over the scale: the size of an element's row and column."""
    if exact.dim() < 2:
        scale = exact.square().mean().sqrt()
    else:
        rows = exact.square().flatten(1).mean(1).sqrt().view(-1, *[1] * (exact.dim() - 1))
        rows = rows.masked_fill(rows == 0, 1.0)
        columns = (exact / rows).square().mean(0, keepdim=True).sqrt()
        scale = rows * columns.masked_fill(columns == 0, 1.0)
    return ((got.double() - exact) / scale).abs().mean().item()
