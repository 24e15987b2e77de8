"""Claim C6 on small sizes; benchmarks/accuracy.py measures the published table."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from rl_consistency.parity.tolerances import ERROR_GROWTH_LIMIT

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "accuracy.py"


def _load():
    # By path: `benchmarks` is a folder of scripts, and a common name for others' packages.
    spec = importlib.util.spec_from_file_location("accuracy_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


accuracy = _load()
CASES = [(case, dtype) for case in accuracy.cases(96, 128) for dtype in case.dtypes]


@pytest.mark.parametrize("case, dtype", CASES, ids=[f"{c.op}-{d}" for c, d in CASES])
def test_error_is_at_most_that_of_the_stock_op(case, dtype):
    rows = accuracy.measure(case, dtype, range(12))
    assert rows
    for row in rows:
        assert row.ratio <= ERROR_GROWTH_LIMIT, row


def test_a_less_accurate_order_is_over_the_limit():
    """Rounding the accumulator to bf16 at every step must show."""

    def mutant(inputs):
        x = inputs["x"].detach()
        total = torch.zeros(x.shape[0])
        for column in x.unbind(1):
            total = (total + column).bfloat16().float()
        return {"y": total}

    case = next(c for c in accuracy.cases(96, 128) if c.op == "row_reduction")
    mutated = accuracy.Case("mutant", case.inputs, mutant, case.stock, case.reference)
    (row,) = accuracy.measure(mutated, torch.float32, range(2))
    assert row.ratio > ERROR_GROWTH_LIMIT


def test_two_exact_results_have_ratio_one():
    assert accuracy.Row("op", "float32", "y", 0.0, 0.0).ratio == 1.0
    assert accuracy.Row("op", "float32", "y", 1e-9, 0.0).ratio == float("inf")
