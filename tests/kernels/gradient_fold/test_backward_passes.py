"""Which backward passes continue a fold, and what one that fails leaves."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rl_consistency.kernels.gradient_fold import gradient_buffer
from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses, GradientBuffer
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.gradient_fold.uses import (
    ALL,
    DTYPES,
    TOKENS,
    backward,
    data,
    gradient_of,
    hold_ends,
    loss,
    parameter,
    spans,
    tied,
    use,
)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_passes_continue_the_same_fold(reentrant):
    param, (buffer,) = tied(1, torch.bfloat16)
    for span in spans([32, 48]):
        x = torch.zeros(1, requires_grad=True)
        redone = lambda x, span=span: loss(param, [buffer], span, x)  # noqa: E731
        checkpoint(redone, x, use_reentrant=reentrant).backward()
    assert same_bytes(param.grad, gradient_of(ALL, 1, torch.bfloat16))


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_loss_that_some_uses_of_a_tied_weight_do_not_reach(dtype, grad_dtype, others):
    param, whole = parameter(dtype, grad_dtype), torch.zeros(24, 40)
    used, unused = GradientBuffer.for_uses(param, 2)
    (dy, _), (x, _) = data(2)
    fold = lambda g, fresh: fold_outer(g, dy, x)  # noqa: E731
    beside = (lambda: (param.float() * 0.0).sum()) if others else (lambda: 0.0)
    for _ in range(1 if others else 2):
        (use(param, used, fold) + beside()).backward()
        fold_outer(whole, dy, x)
        use(param, unused, fold)
    assert same_bytes(param.grad, whole.to(grad_dtype))
    if others:
        with pytest.raises(ValueError, match="1 of the 2 uses.*other terms"):
            (use(param, used, fold) + beside()).backward()
        param.grad = None
    with pytest.raises(ValueError, match="1 of the 2 uses"):
        torch.autograd.grad(use(param, used, fold), param)
    use(param, used, fold).backward()
    param.grad = None
    param.register_hook(lambda g: None)
    before = param.grad = torch.ones_like(param, dtype=grad_dtype)
    with pytest.raises(ValueError, match="1 of the 2 uses"):
        (use(param, used, fold) + (param.float() * 0.0).sum()).backward()
    assert param.grad is before


def test_a_parameter_frozen_since_the_forward_pass_keeps_its_gradient():
    param, x = parameter(), torch.zeros(1, requires_grad=True)
    buffer = GradientBuffer(param)
    backward(param, [buffer], slice(0, 64))
    before, later = param.grad.clone(), loss(param, [buffer], slice(64, TOKENS), x)
    param.requires_grad_(False)
    later.backward()
    assert same_bytes(param.grad, before)


def test_a_fold_of_a_frozen_parameter_drops_its_gradient(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(gradient_buffer, "accumulates_gradient", lambda ctx, param: True)
    param, x = parameter(), torch.zeros(1, requires_grad=True)
    buffer = GradientBuffer(param)
    backward(param, [buffer], slice(0, 64))
    later = loss(param, [buffer], slice(64, TOKENS), x)
    param.requires_grad_(False)
    later.backward()
    assert param.grad is None


@pytest.mark.parametrize("between", ["autograd.grad", "another session"])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_nothing_lets_a_failed_pass_go_on(uses, dtype, grad_dtype, between):
    params, passes = [parameter(dtype, grad_dtype) for _ in range(2)], BackwardPasses()
    buffers = [GradientBuffer.for_uses(p, uses, passes) for p in params]

    def both(span):
        return sum(loss(p, own, span) for p, own in zip(params, buffers, strict=True))

    both(slice(0, 64)).backward()
    hook = params[0].register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        both(slice(64, TOKENS)).backward()
    hook.remove()
    if between == "autograd.grad":
        torch.autograd.grad(both(ALL), params)
    else:
        passes.close()
        passes = BackwardPasses()
        buffers = [GradientBuffer.for_uses(p, uses, passes) for p in params]
    with pytest.raises(ValueError, match=r"ended in an error.*zero_grad"):
        both(slice(64, TOKENS)).backward()
    for p in params:
        p.grad = None
    both(ALL).backward()
    whole = parameter(dtype, grad_dtype)
    backward(whole, GradientBuffer.for_uses(whole, uses), ALL)
    assert all(same_bytes(p.grad, whole.grad) for p in params)


def fail(*_):
    raise KeyboardInterrupt


def spoil(accumulator, fresh):
    accumulator.add_(1.0)
    fail()


def in_a_fold(param, buffers, monkeypatch):
    use(param, buffers[0], spoil).backward()


def at_the_end(param, buffers, monkeypatch):
    monkeypatch.setattr(gradient_buffer._Gradient, "publish", fail)
    backward(param, buffers, slice(64, TOKENS))


def by(register):
    def failing(param, buffers, monkeypatch):
        hook = register(param)
        try:
            backward(param, buffers, slice(64, TOKENS))
        finally:
            hook.remove()

    return failing


def before_it_is_taken(param):
    node = param.expand_as(param).grad_fn.next_functions[0][0]
    handle = node.register_prehook(fail)
    handle.node = node  # the parameter does not keep it
    return handle


FAILURES = {
    "in a fold": in_a_fold,
    "in a hook": by(lambda p: p.register_hook(fail)),
    "before autograd takes it": by(before_it_is_taken),
    "behind autograd": by(lambda p: p.register_post_accumulate_grad_hook(fail)),
    "at the end": at_the_end,
}
"""Where a pass fails."""
ZEROED = [lambda param: setattr(param, "grad", None), lambda param: param.grad.zero_()]


@pytest.mark.parametrize("zero", ZEROED)
@pytest.mark.parametrize("place", FAILURES)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_failed_pass_is_gone_on_from_after_zero_grad_alone(
    uses, dtype, grad_dtype, place, zero, monkeypatch
):
    param, buffers = tied(uses, dtype, grad_dtype)
    backward(param, buffers, slice(0, 64))
    before = param.grad
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        FAILURES[place](param, buffers, patched)
    if "autograd" in place:
        assert param.grad is before
    for _ in range(2):
        with pytest.raises(ValueError, match=r"ended in an error.*zero_grad"):
            backward(param, buffers, slice(64, TOKENS))
    zero(param)
    backward(param, buffers, ALL)
    assert same_bytes(param.grad, gradient_of(ALL, uses, dtype, grad_dtype))


def test_a_gradient_removed_after_an_error_stays_removed_though_autograd_drops_the_pass_late(
    monkeypatch,
):
    """The error is not in an op of ours, and another op folds after the first was handed over. A
    device's thread may drop the pass when `backward()` has raised already."""
    held = hold_ends(monkeypatch)
    first, other, whole = parameter(), parameter(), parameter()
    passes = BackwardPasses()
    (buffer,), others = (GradientBuffer.for_uses(each, 1, passes) for each in (first, other))
    backward(first, [buffer], slice(0, 64))
    x = torch.zeros(1, requires_grad=True)
    hidden = loss(other, others, ALL, x).reshape(1)
    x.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(first, [buffer], slice(64, TOKENS), hidden).backward()
    assert first.grad is not None and held
    first.grad = None
    held.clear()
    assert first.grad is None
    backward(first, [buffer], ALL)
    backward(whole, [GradientBuffer(whole)], ALL)
    assert same_bytes(first.grad, whole.grad)


def test_a_failed_pass_that_nobody_ends_loses_the_gradient_and_is_gone_on_from(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(
        gradient_buffer._Gradient, "abandon", lambda gradient, *_: gradient._forget()
    )
    param, (buffer,) = tied()
    backward(param, [buffer], slice(0, 64))
    hook = param.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(param, [buffer], slice(64, TOKENS))
    hook.remove()
    backward(param, [buffer], slice(64, TOKENS))
    assert same_bytes(param.grad, gradient_of(slice(64, TOKENS), 1))


def test_new_gradients_after_a_failed_pass_are_added_to():
    param, (buffer,) = tied()
    hook = param.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(param, [buffer], ALL)
    hook.remove()
    param.grad = None
    (param * 0.0).sum().backward()
    backward(param, [buffer], ALL)
    assert same_bytes(param.grad, gradient_of())


def test_a_parameter_goes_with_its_model():
    passes = BackwardPasses()
    param = parameter()
    buffers, held = GradientBuffer.for_uses(param, 2, passes), weakref.ref(param)
    backward(param, buffers, ALL)
    gc.disable()
    try:
        del param, buffers
        assert held() is None
    finally:
        gc.enable()


def test_an_error_that_is_kept_does_not_keep_the_pass(monkeypatch):
    """Its traceback holds the frames of the backward functions."""
    param, errors = parameter(), []
    buffer = GradientBuffer(param)

    def refuse(accumulator, fresh):
        raise torch.OutOfMemoryError("no memory")

    def refused():
        use(param, buffer, refuse).backward()

    def refused_before_it_folds():
        backward(param, [buffer], ALL)
        backward(param, [buffer], ALL)

    def interrupted_at_its_end():
        with monkeypatch.context() as patched:
            patched.setattr(gradient_buffer._Gradient, "publish", lambda self: 1 / 0)
            backward(param, [buffer], ALL)

    for fail in (refused, refused_before_it_folds, interrupted_at_its_end):
        hook = param.register_hook(lambda g: g * 0.5)
        try:
            fail()
        except (torch.OutOfMemoryError, ValueError, ZeroDivisionError) as error:
            errors.append(error)
        hook.remove()
        param.grad = None
        backward(param, [buffer], ALL)
        assert same_bytes(param.grad, gradient_of())
        param.grad = None
    assert len(errors) == 3 and all(error.__traceback__ for error in errors)


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_what_a_failed_pass_held_is_freed_at_once(dtype, grad_dtype):
    param, passes, held = parameter(dtype, grad_dtype), BackwardPasses(), []
    buffers = GradientBuffer.for_uses(param, 2, passes)
    backward(param, buffers, slice(0, 64))

    def refuse(accumulator, fresh):
        held.append(StorageWeakRef(accumulator.untyped_storage()))
        held.append(StorageWeakRef(before.untyped_storage()))
        raise torch.OutOfMemoryError("no memory")

    before = param.grad
    with contextlib.suppress(torch.OutOfMemoryError):
        use(param, buffers[0], refuse).backward()
    param.grad = before = None
    assert len(held) == 2 and all(storage.expired() for storage in held)
