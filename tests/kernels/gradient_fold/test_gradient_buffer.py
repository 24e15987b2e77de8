"""A canonical gradient is an ordinary one to autograd, hooks and optimizers, whatever the cut."""

import copy
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.mutants.perturbations import tied_weights_share_a_buffer
from tests.kernels.gradient_fold.uses import (
    ALL,
    CUTS,
    DTYPES,
    TOKENS,
    backward,
    data,
    gradient_of,
    loss,
    parameter,
    spans,
    tied,
    use,
)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_16_bit_gradient_is_the_fp32_one_rounded_once(uses):
    gradients = []
    for grad_dtype in (torch.float32, torch.bfloat16):
        param = parameter(torch.bfloat16, grad_dtype)
        buffers = GradientBuffer.for_uses(param, uses)
        for span in spans([32, 48]):
            backward(param, buffers, span)
        gradients.append(param.grad)
    assert same_bytes(gradients[0].bfloat16(), gradients[1])


def test_a_tied_gradient_is_the_sum_of_its_uses_in_their_order():
    dy, x = data(2)
    param = parameter()
    backward(param, GradientBuffer.for_uses(param, 2), ALL)
    parts = [torch.zeros(24, 40), torch.zeros(24, 40)]
    for part, one_dy, one_x in zip(parts, dy, x, strict=True):
        fold_outer(part, one_dy, one_x)
    assert same_bytes(param.grad, parts[0] + parts[1])


def test_uses_that_share_an_accumulator_fail_where_each_has_its_own():
    """The folds of the uses interleave by micro-batch."""
    gradients = []
    for cuts in ([], [32, 48]):
        param = parameter()
        with tied_weights_share_a_buffer.perturb():
            buffers = GradientBuffer.for_uses(param, 2)
            for span in spans(cuts):
                backward(param, buffers, span)
        gradients.append(param.grad)
    assert not same_bytes(*gradients)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_every_hook_fires_once_a_pass_with_the_finished_gradient(uses, dtype, grad_dtype):
    param, seen = parameter(dtype, grad_dtype), []
    buffers = GradientBuffer.for_uses(param, uses)
    param.register_hook(lambda gradient: seen.append(gradient.clone()))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for span in spans([32, 48]):
        backward(param, buffers, span)
        tensor_hook, post_hook = seen
        assert same_bytes(tensor_hook, param.grad) and same_bytes(post_hook, param.grad)
        seen.clear()


@pytest.mark.parametrize("uses", [1, 2])
def test_a_hook_that_keeps_the_gradient_does_not_stop_the_fold(uses):
    whole, param, kept = parameter(), parameter(), []
    backward(whole, GradientBuffer.for_uses(whole, uses), ALL)
    param.register_hook(kept.append)
    buffers = GradientBuffer.for_uses(param, uses)
    for span in spans([32, 48]):
        backward(param, buffers, span)
    assert same_bytes(param.grad, whole.grad) and len(kept) == 3


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_hook_may_change_the_gradient_of_one_pass_but_not_of_several(
    uses, dtype, grad_dtype, in_place
):
    param = parameter(dtype, grad_dtype)
    param.register_hook(lambda g: g.mul_(0.5) if in_place else g * 0.5)
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64))
    assert same_bytes(param.grad, gradient_of(slice(0, 64), uses, dtype, grad_dtype) * 0.5)
    with pytest.raises(ValueError, match=r"was changed.*hook"):
        backward(param, buffers, slice(64, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fold_costs_autograd_no_copy(dtype):
    param, seen = parameter(dtype, torch.float32), []
    buffer = GradientBuffer(param)
    fold = lambda g, fresh: seen.append(g.data_ptr())  # noqa: E731
    for _ in range(3):
        use(param, buffer, fold).backward()
    assert set(seen) == {param.grad.data_ptr()}


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_autograd_grad_gives_the_gradient_and_leaves_the_parameters_alone(uses, dtype, grad_dtype):
    param, buffers = tied(uses, dtype, grad_dtype)
    backward(param, buffers, slice(0, 64))
    before = param.grad.clone()
    (found,) = torch.autograd.grad(loss(param, buffers, slice(64, TOKENS)), param)
    assert same_bytes(
        found, gradient_of(slice(64, TOKENS), uses, dtype, grad_dtype)
    ) and same_bytes(param.grad, before)
    backward(param, buffers, slice(64, TOKENS))
    assert same_bytes(param.grad, gradient_of(ALL, uses, dtype, grad_dtype))


def test_a_gradient_that_nobody_asks_for_is_not_folded():
    param, x = parameter(), torch.zeros(1, requires_grad=True)
    buffer = GradientBuffer(param)

    def refuse(g, fresh):
        raise AssertionError

    torch.autograd.grad(use(param, buffer, refuse, x), x)
    use(param, buffer, refuse, x).backward(inputs=[x])
    assert param.grad is None
    use(param, buffer, lambda g, fresh: g.add_(1.0), x).backward(inputs=[param])
    assert (param.grad == 1.0).all()


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_optimizers_take_the_gradient(optimizer, options, dtype):
    weights = []
    for cuts in CUTS[:3]:
        param = parameter(dtype)
        buffer, steps = GradientBuffer(param), optimizer([param], lr=0.01, **options)
        for _ in range(2):
            for span in spans(cuts):
                backward(param, [buffer], span)
            torch.nn.utils.clip_grad_norm_([param], 1.0)
            steps.step()
            steps.zero_grad()
        weights.append(param.detach())
    assert all(same_bytes(weight, weights[0]) for weight in weights)


def test_an_optimizer_may_step_in_the_backward_pass():
    param, grads = parameter(torch.bfloat16), []
    optimizer = torch.optim.SGD([param], lr=0.1)

    def step(p):
        grads.append(p.grad)
        optimizer.step()
        optimizer.zero_grad()

    param.register_post_accumulate_grad_hook(step)
    buffer = GradientBuffer(param)
    for _ in range(2):
        backward(param, [buffer], ALL)
    assert same_bytes(*grads) and param.grad is None


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_gradient_that_the_optimizer_drops_leaves_the_memory(uses, dtype, grad_dtype):
    param, held = parameter(dtype, grad_dtype), []
    buffers = GradientBuffer.for_uses(param, uses)
    dy, x = data(uses)

    def fold(g, fresh):
        held.append(StorageWeakRef(g.untyped_storage()))
        fold_outer(g, dy[0], x[0])

    sum(use(param, buffer, fold) for buffer in buffers).backward()
    param.grad = None
    assert len(held) == uses and all(storage.expired() for storage in held)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("uses", [1, 2])
def test_a_copy_of_a_buffer_starts_afresh(uses, clone):
    param, buffers = tied(uses)
    backward(param, buffers, ALL)
    copied, copies = clone((param, buffers))
    copied.grad = None
    assert copies[0].parameter is copied
    backward(copied, copies, ALL)
    assert same_bytes(copied.grad, param.grad)


def test_without_a_buffer_autograd_receives_the_fold_in_the_gradients_dtype():
    dy, x = data(1)
    expected = torch.zeros(24, 40)
    fold_outer(expected, dy[0], x[0])
    for grad_dtype in (torch.bfloat16, torch.float32):
        param = parameter(torch.bfloat16, grad_dtype)
        backward(param, [None], ALL)
        assert same_bytes(param.grad, expected.to(grad_dtype))


@pytest.mark.parametrize("uses", [1, 2])
def test_a_fold_that_overwrites_gets_memory_that_was_not_zeroed(uses, monkeypatch):
    dy, x = data(uses)
    param = parameter()
    filled = torch.zeros_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: filled(*a, **k).fill_(float("nan")))
    for i, buffer in enumerate(GradientBuffer.for_uses(param, uses)):
        fold = lambda g, fresh, i=i: fold_outer(g, dy[i][:64], x[i][:64], fresh=fresh)  # noqa: E731
        use(param, buffer, fold, overwrites=True).backward()
    assert same_bytes(param.grad, gradient_of(slice(0, 64), uses))
