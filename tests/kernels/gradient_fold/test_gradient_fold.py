import itertools

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.op import (
    fold_columns,
    fold_outer,
    fold_rows,
    fold_step_sums,
)
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.parity.bytes import same_bytes

TOKENS = 176
CUTS = ([16], [32, 48], [160], list(range(16, TOKENS, 16)), [48, 64, 144])
VOCABULARY = 11


def spans(cuts):
    edges = [0, *cuts, TOKENS]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def folds(dtype=torch.float32):
    """Name -> (buffer shape, fold of one span of tokens)."""
    dy, x = probe((TOKENS, 24), dtype), probe((TOKENS, 40), dtype, seed=1)
    heads = probe((TOKENS, 3, 24), dtype, seed=2)
    index = torch.arange(TOKENS) * 7 % VOCABULARY
    return {
        "outer": ((24, 40), lambda g, s: fold_outer(g, dy[s], x[s])),
        "columns": ((24,), lambda g, s: fold_columns(g, dy[s])),
        "heads": ((24,), lambda g, s: fold_columns(g, heads[s].flatten(0, 1), rows_per_token=3)),
        "rows": ((VOCABULARY, 40), lambda g, s: fold_rows(g, index[s], x[s])),
    }


def folded(shape, fold, cuts=()):
    buffer = torch.zeros(shape)
    for span in spans(cuts):
        fold(buffer, span)
    return buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["outer", "columns", "heads", "rows"])
def test_cuts_at_multiples_of_16_change_nothing(name, dtype):
    shape, fold = folds(dtype)[name]
    whole = folded(shape, fold)
    assert same_bytes(folded(shape, fold), whole)
    for cuts in CUTS:
        assert same_bytes(folded(shape, fold, cuts), whole), cuts


@pytest.mark.parametrize("threads", [1, 3])
def test_cuts_change_nothing_at_any_thread_count(threads):
    before = torch.get_num_threads()
    dy, x = probe((128, 256)), probe((128, 320), seed=1)
    whole, cut = torch.zeros(256, 320), torch.zeros(256, 320)
    torch.set_num_threads(threads)
    try:
        fold_outer(whole, dy, x)
        for i in range(0, 128, 32):
            fold_outer(cut, dy[i : i + 32], x[i : i + 32])
    finally:
        torch.set_num_threads(before)
    assert same_bytes(whole, cut)


@pytest.mark.parametrize("name", ["outer", "columns", "heads"])
def test_a_cut_elsewhere_fails_the_same_check(name):
    shape, fold = folds()[name]
    assert not same_bytes(folded(shape, fold, [50]), folded(shape, fold))


@pytest.mark.parametrize("magnitude", [1.0, 1e-30])
def test_steps_of_zero_gradient_change_nothing(magnitude):
    dy, x = probe((40, 24)) * magnitude, probe((40, 40), seed=1) * magnitude
    plain, filled = torch.zeros(24, 40), torch.zeros(24, 40)
    fold_outer(plain, dy, x)
    zeros = torch.zeros(40, 24)
    fold_outer(filled, torch.cat([dy, zeros]), torch.cat([x, probe((40, 40), seed=2)]))
    assert same_bytes(plain, filled)


def test_an_empty_call_changes_nothing():
    buffer = probe((24, 40))
    before = buffer.clone()
    fold_outer(buffer, torch.zeros(0, 24), torch.zeros(0, 40))
    assert same_bytes(buffer, before)
    columns = before[0].clone()
    fold_columns(columns, torch.zeros(0, 40))
    fold_rows(buffer, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 40))
    assert same_bytes(columns, before[0])
    assert same_bytes(buffer, before)


@pytest.mark.parametrize("tokens", [0, 16, 33])
def test_a_fresh_buffer_counts_as_zero_whatever_it_holds(tokens):
    dy, x = probe((64, 24))[:tokens], probe((64, 40), seed=1)[:tokens]
    fresh, expected = torch.full((24, 40), float("nan")), torch.zeros(24, 40)
    fold_outer(fresh, dy, x, fresh=True)
    fold_outer(expected, dy, x)
    assert same_bytes(fresh, expected)
    fresh, expected = torch.full((24,), float("nan")).double(), torch.zeros(24).double()
    fold_columns(fresh, dy, fresh=True)
    fold_columns(expected, dy)
    assert same_bytes(fresh, expected)


def test_step_sums_made_elsewhere_continue_the_same_fold():
    rows = probe((TOKENS, 24))
    whole, continued = (torch.zeros(24, dtype=torch.float64) for _ in range(2))
    fold_columns(whole, rows)
    fold_step_sums(continued, tree_sum(rows.view(-1, 16, 24), dim=1))
    assert same_bytes(whole, continued)


def test_a_row_of_index_minus_one_is_left_out():
    rows, index = probe((5, 40)), torch.tensor([3, -1, 0, -1, 3])
    got, expected = torch.zeros(7, 40), torch.zeros(7, 40)
    fold_rows(got, index, rows)
    fold_rows(expected, index[[0, 2, 4]], rows[[0, 2, 4]])
    assert same_bytes(got, expected)


@pytest.mark.parametrize("shape", [(4, 32), (6, 32), (8, 64), (64, 64)])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_buffer_that_lies_otherwise_has_the_same_bytes(shape, fresh):
    """With few rows the library takes another way through it; the control shows that."""
    rows, columns = shape
    dy, x = probe((TOKENS, rows)), probe((TOKENS, columns), seed=1)
    straight, other = torch.zeros(shape), torch.zeros(shape[::-1]).t()
    for buffer in (straight, other):
        fold_outer(buffer, dy, x, fresh=fresh)
    assert same_bytes(other.contiguous(), straight) and not other.is_contiguous()
    control = torch.zeros(shape[::-1]).t()
    for left, right in zip(dy.split(16), x.split(16), strict=True):
        control.addmm_(left.t(), right)
    assert torch.equal(control, straight) == (rows > 8)
