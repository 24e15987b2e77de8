"""What every op promises, on a CPU; `tests/gpu/kernels/test_contract_cuda.py` asks it of a GPU.

The ops and their operands stand in `rl_consistency/cases`. What is particular to an op, bad input
and special values, has tests of its own.
"""

from dataclasses import replace

import pytest
import torch

from rl_consistency.cases.case import Setting, as_tuple
from rl_consistency.cases.table import CASES, FP32_ONLY
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.laws import (
    case_cuts_alike,
    case_gradients,
    case_rows_alike,
    case_ways_alike,
    judged,
)

ROWS = 80
MOST_ERROR = {torch.float32: 32, torch.bfloat16: 2, torch.float16: 2}
"""Relative error of a whole tensor, in last places; C6 compares errors with those of stock ops."""
SEEN = [op for op in CASES if op != "attention"]
"""Ops whose rows do not see each other."""
FOLDED = ("linear", "rms_norm", "embedding", "router", "token_logprobs")
"""Ops with parameters whose gradient may be cut after any step."""


@pytest.fixture
def where():
    """Device and sizes."""
    return Setting(dtype=torch.float32)


def every(*ops):
    """Parameters: each op in each dtype that it has."""
    pairs = [(op, dtype) for op in ops for dtype in (DTYPES[:1] if op in FP32_ONLY else DTYPES)]
    return pytest.mark.parametrize(("op", "dtype"), pairs, ids=str)


def cases_of(op, dtype, where):
    return list(CASES[op](replace(where, dtype=dtype)))


def found(case, op, operands, dys):
    """Outputs and gradients by name."""
    results = dict(zip(case.outputs, (y.detach() for y in as_tuple(op(*operands))), strict=True))
    if case.gradients:
        gradients = case_gradients(case, op, operands, dys, case.gradients)
        results |= {f"d{name}": g for name, g in zip(case.gradients, gradients, strict=True)}
    return results


def ours(case, change=lambda x: x):
    """Outputs and gradients, of operands in another storage."""
    operands, dys = case.draw(ROWS, 1), case.draw_dys(ROWS, 1)
    return found(case, case.call, [change(x) for x in operands], [change(dy) for dy in dys])


def same(a, b):
    return [name for name in a if not same_bytes(a[name], b[name])] == []


@every(*CASES)
def test_output_and_gradients_match_fp64(op, dtype, where):
    for case in cases_of(op, dtype, where):
        if case.reference is None:
            continue
        operands, dys = case.draw(ROWS, 1), case.draw_dys(ROWS, 1)
        wide = [x.double() if x.is_floating_point() else x for x in operands]
        exact = found(case, case.reference, wide, dys)
        for name, value in found(case, case.call, operands, dys).items():
            error = (value.double() - exact[name]).norm()
            bound = MOST_ERROR[dtype] * torch.finfo(dtype).eps * exact[name].double().norm()
            assert error <= bound, (case.size, name)


@every(*SEEN)
def test_rows_do_not_depend_on_the_batch(op, dtype, where):
    """Nor on their order, place, neighbours and storage; their gradients neither."""
    for case in cases_of(op, dtype, where):
        tally = judged(case_rows_alike, case, ROWS)
        assert tally.passed, tally.detail


@every("linear", "rms_norm", "experts", "token_logprobs")
def test_every_other_way_gives_the_same_bytes(op, dtype, where):
    tallies = [judged(case_ways_alike, case, ROWS) for case in cases_of(op, dtype, where)]
    assert sum(tally.cases for tally in tallies) > 0
    assert [tally.detail for tally in tallies if tally.mismatches] == []


@every(*FOLDED)
def test_gradients_do_not_depend_on_the_cut(op, dtype, where):
    """Nor on filler, and a repeated call has the same."""
    judged_cases = [case for case in cases_of(op, dtype, where) if case.parameters and case.cuts]
    assert judged_cases
    for case in judged_cases:
        tally = judged(case_cuts_alike, case, ROWS)
        assert tally.passed, tally.detail


@every(*CASES)
def test_strides_and_repetition_do_not_matter(op, dtype, where):
    def transposed(x):
        return x if x.dim() < 2 else x.mT.contiguous().mT

    def sliced(x):
        return torch.stack([x, x], dim=-1)[..., 0]

    for case in cases_of(op, dtype, where):
        expected = ours(case)
        for change in (torch.clone, transposed, sliced):
            assert same(ours(case, change), expected), (case.size, change.__name__)


@every(*(op for op in SEEN if op not in ("masked_reduction", "gradient_norm")))
def test_no_rows_give_no_rows_and_zero_gradients(op, dtype, where):
    for case in cases_of(op, dtype, where):
        operands, count = case.draw(1, 1), len(case.rows)
        none = [x[:0] for x in operands[:count]] + list(operands[count:])
        for name, value in found(
            case, case.call, none, [dy[:0] for dy in case.draw_dys(1, 1)]
        ).items():
            shared = name[1:] in case.shared
            assert not value.any() if shared else len(value) == 0, (case.size, name)


@pytest.mark.parametrize("op", SEEN)
def test_a_result_that_depends_on_the_number_of_rows_fails_the_same_check(op, where):
    """One last bit in calls of few rows."""
    for case in cases_of(op, torch.float32, where):

        def wrong(*operands, case=case):
            results = as_tuple(case.call(*operands))
            if len(operands[0]) >= 16:
                return results
            return tuple(y * (1 + 2**-23) if y.is_floating_point() else y + 1 for y in results)

        assert judged(case_rows_alike, case, ROWS, op=wrong).mismatches > 0


@pytest.mark.parametrize("op", FOLDED)
def test_gradients_that_autograd_adds_up_fail_the_same_check(op, where):
    for case in cases_of(op, torch.float32, where):
        if case.parameters and case.cuts:
            assert judged(case_cuts_alike, case, 3 * ROWS, op=case.call).mismatches > 0, case.size
