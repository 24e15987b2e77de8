import copy
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn

from rl_consistency.kernels.gradient_fold.op import (
    GradientBuffer,
    fold_columns,
    fold_outer,
    fold_parameter,
    fold_rows,
    fold_step_sums,
)
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.parity.digest import first_difference
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.probe import probe

TOKENS = 176
CUTS = ([16], [32, 48], [160], list(range(16, TOKENS, 16)), [48, 64, 144])
VOCABULARY = 11


def same_bytes(a, b):
    return first_difference({"": a}, {"": b}) is None


def spans(cuts):
    edges = [0, *cuts, TOKENS]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def folds(dtype=torch.float32):
    """Name -> (buffer shape, fold of one span of tokens, fp64 result)."""
    dy, x = probe((TOKENS, 24), dtype), probe((TOKENS, 40), dtype, seed=1)
    heads = probe((TOKENS * 3, 24), dtype, seed=2)
    index = torch.arange(TOKENS) * 7 % VOCABULARY
    rows = torch.zeros(VOCABULARY, 40, dtype=torch.float64).index_add_(0, index, x.double())
    return {
        "outer": ((24, 40), lambda g, s: fold_outer(g, dy[s], x[s]), dy.double().t() @ x.double()),
        "columns": ((24,), lambda g, s: fold_columns(g, dy[s]), dy.double().sum(0)),
        "heads": (
            (24,),
            lambda g, s: fold_columns(g, heads[s.start * 3 : s.stop * 3], rows_per_token=3),
            heads.double().sum(0),
        ),
        "rows": ((VOCABULARY, 40), lambda g, s: fold_rows(g, index[s], x[s]), rows),
    }


def folded(shape, fold, cuts=()):
    buffer = torch.zeros(shape)
    for span in spans(cuts):
        fold(buffer, span)
    return buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["outer", "columns", "heads", "rows"])
def test_matches_fp64(name, dtype):
    shape, fold, exact = folds(dtype)[name]
    assert_within(folded(shape, fold), exact, "reduction", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["outer", "columns", "heads", "rows"])
def test_cuts_at_multiples_of_16_change_nothing(name, dtype):
    shape, fold, _ = folds(dtype)[name]
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
    shape, fold, _ = folds()[name]
    assert not same_bytes(folded(shape, fold, [50]), folded(shape, fold))


def test_adding_micro_batch_sums_fails_the_same_check():
    """What autograd does: one product per micro-batch, added to the gradient."""
    dy, x = probe((TOKENS, 24)), probe((TOKENS, 40), seed=1)

    def added(buffer, span):
        buffer += dy[span].t() @ x[span]

    assert not same_bytes(folded((24, 40), added, [32, 48]), folded((24, 40), added))


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


def test_non_contiguous_operands_give_the_same_bytes():
    dy, x = probe((TOKENS, 24)), probe((TOKENS, 40), seed=1)
    plain, strided = torch.zeros(24, 40), torch.zeros(24, 40)
    fold_outer(plain, dy, x)
    fold_outer(strided, dy.t().contiguous().t(), x.t().contiguous().t())
    assert same_bytes(plain, strided)


def parameter(dtype=torch.float32):
    return nn.Parameter(probe((24, 40), dtype, seed=9))


def backward(param, buffers, span, dy, x):
    """One backward pass over a span of tokens, each use of the parameter in turn."""
    for i, buffer in enumerate(buffers):
        fold_parameter(param, buffer, lambda g, fresh, i=i: fold_outer(g, dy[i][span], x[i][span]))


def data(uses):
    dy = [probe((TOKENS, 24), seed=10 + i) for i in range(uses)]
    return dy, [probe((TOKENS, 40), seed=20 + i) for i in range(uses)]


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_continues_over_backward_passes(uses, dtype):
    gradients = []
    for cuts in ([], *CUTS):
        param = parameter(dtype)
        buffers = GradientBuffer.for_uses(param, uses)
        for span in spans(cuts):
            backward(param, buffers, span, *data(uses))
        assert param.grad is not None and param.grad.dtype == torch.float32
        gradients.append(param.grad)
    assert all(same_bytes(gradient, gradients[0]) for gradient in gradients)


def test_a_tied_gradient_is_the_sum_of_its_uses_in_their_order():
    dy, x = data(2)
    param = parameter()
    backward(param, GradientBuffer.for_uses(param, 2), slice(0, TOKENS), dy, x)
    parts = [torch.zeros(24, 40), torch.zeros(24, 40)]
    for part, one_dy, one_x in zip(parts, dy, x, strict=True):
        fold_outer(part, one_dy, one_x)
    assert same_bytes(param.grad, parts[0] + parts[1])


def test_a_shared_buffer_fails_where_tied_uses_have_their_own():
    """Folding both uses into one accumulator interleaves them by micro-batch."""
    gradients = []
    for cuts in ([], [32, 48]):
        param = parameter()
        buffer = GradientBuffer(param)
        for span in spans(cuts):
            backward(param, [buffer, buffer], span, *data(2))
        gradients.append(param.grad)
    assert not same_bytes(*gradients)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_that_the_optimizer_drops_leaves_the_memory(uses):
    param = parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64), *data(uses))
    gradient = weakref.ref(param.grad)
    param.grad = None
    assert gradient() is None


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("uses", [1, 2])
def test_a_copy_of_a_buffer_starts_afresh(uses, clone):
    param = parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, TOKENS), *data(uses))
    copied, copies = clone((param, buffers))
    assert copies[0].parameter is copied and copied.grad is None
    backward(copied, copies, slice(0, TOKENS), *data(uses))
    assert same_bytes(copied.grad, param.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
def test_zero_grad_starts_afresh(uses, set_to_none):
    param = parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    optimizer = torch.optim.SGD([param], lr=0.1)
    backward(param, buffers, slice(0, 64), *data(uses))
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(param, buffers, slice(64, TOKENS), *data(uses))

    fresh = parameter()
    backward(fresh, GradientBuffer.for_uses(fresh, uses), slice(64, TOKENS), *data(uses))
    assert same_bytes(param.grad, fresh.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_tied_gradient_may_be_scaled_before_zero_grad(set_to_none):
    param = parameter()
    buffers = GradientBuffer.for_uses(param, 2)
    backward(param, buffers, slice(0, 64), *data(2))
    param.grad.mul_(0.5)
    torch.optim.SGD([param], lr=0.1).zero_grad(set_to_none=set_to_none)
    backward(param, buffers, slice(0, 64), *data(2))


def test_scaling_a_tied_gradient_between_backward_passes_is_refused():
    param = parameter()
    buffers = GradientBuffer.for_uses(param, 2)
    backward(param, buffers, slice(0, 64), *data(2))
    param.grad.mul_(0.5)
    with pytest.raises(ValueError, match=r"was changed.*zero_grad"):
        backward(param, buffers, slice(64, TOKENS), *data(2))


@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_of_another_dtype_is_refused(uses):
    param = parameter(torch.bfloat16)
    param.grad = torch.zeros_like(param)
    buffers = GradientBuffer.for_uses(param, uses)
    with pytest.raises(ValueError, match=r"gradient present is torch.bfloat16.*zero_grad"):
        backward(param, buffers, slice(0, 64), *data(uses))


def test_without_a_buffer_autograd_receives_the_fold_in_the_parameters_dtype():
    param = parameter(torch.bfloat16)
    dy, x = data(1)
    gradient = fold_parameter(param, None, lambda g, fresh: fold_outer(g, dy[0], x[0]))
    expected = torch.zeros(24, 40)
    fold_outer(expected, dy[0], x[0])
    assert same_bytes(gradient, expected.bfloat16())
    assert param.grad is None


@pytest.mark.parametrize("tokens", [0, 16, 33])
def test_a_fresh_buffer_counts_as_zero_whatever_it_holds(tokens):
    dy, x = (rows[0][:tokens] for rows in data(1))
    fresh, expected = torch.full((24, 40), float("nan")), torch.zeros(24, 40)
    fold_outer(fresh, dy, x, fresh=True)
    fold_outer(expected, dy, x)
    assert same_bytes(fresh, expected)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_fold_that_overwrites_gets_memory_that_was_not_zeroed(uses, monkeypatch):
    dy, x = data(uses)
    whole = parameter()
    backward(whole, GradientBuffer.for_uses(whole, uses), slice(0, 64), dy, x)
    filled = torch.zeros_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: filled(*a, **k).fill_(float("nan")))
    param = parameter()
    for i, buffer in enumerate(GradientBuffer.for_uses(param, uses)):
        fold_parameter(
            param,
            buffer,
            lambda g, fresh, i=i: fold_outer(g, dy[i][:64], x[i][:64], fresh=fresh),
            overwrites=True,
        )
    assert same_bytes(param.grad, whole.grad)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("uses", [1, 2])
def test_a_fold_that_fails_leaves_no_undefined_gradient(uses, overwrites, vector, monkeypatch):
    param = nn.Parameter(parameter().detach()[0]) if vector else parameter()
    filled = torch.zeros_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: filled(*a, **k).fill_(float("nan")))

    def refuse(accumulator, fresh):
        assert fresh and accumulator.isnan().all() == overwrites
        accumulator.add_(1.0)
        raise torch.OutOfMemoryError("no memory")

    buffer, *_ = GradientBuffer.for_uses(param, uses)
    with pytest.raises(torch.OutOfMemoryError):
        fold_parameter(param, buffer, refuse, overwrites=overwrites)
    assert not param.grad.any() and not buffer.accumulator()[0].any()


@pytest.mark.parametrize("vector", [False, True])
def test_a_later_fold_that_fails_publishes_nothing(vector):
    param = nn.Parameter(parameter().detach()[0]) if vector else parameter()
    buffer = GradientBuffer(param)
    fold_parameter(param, buffer, lambda g, fresh: g.fill_(2.0), overwrites=True)

    def refuse(accumulator, fresh):
        assert not fresh
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        fold_parameter(param, buffer, refuse, overwrites=True)
    assert (param.grad == 2.0).all()


@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_that_was_there_first_is_continued(uses):
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -2.0, 3.0])
    buffers = GradientBuffer.for_uses(parameter, uses)
    for buffer in buffers:
        buffer.accumulator()[0].add_(10.0)
        buffer.commit()
    assert parameter.grad.tolist() == [1.0 + 10 * uses, -2.0 + 10 * uses, 3.0 + 10 * uses]


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
