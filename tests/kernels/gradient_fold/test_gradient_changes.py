"""What people write into a gradient between two backward passes counts."""

import copy
import io

import pytest
import torch
from torch import nn

from rl_consistency.kernels.gradient_fold import gradient_buffer
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.gradient_fold.uses import (
    ALL,
    DTYPES,
    TOKENS,
    assert_near,
    backward,
    gradient_of,
    loss,
    parameter,
    spans,
    tied,
    use,
)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_zero_grad_starts_afresh_and_what_came_before_may_be_scaled(uses, set_to_none, scale):
    param, buffers = tied(uses)
    backward(param, buffers, slice(0, 64))
    param.grad.mul_(scale)
    torch.optim.SGD([param], lr=0.1).zero_grad(set_to_none=set_to_none)
    backward(param, buffers, slice(64, TOKENS))
    assert same_bytes(param.grad, gradient_of(slice(64, TOKENS), uses))


CHANGES = {
    "scaled": lambda param: param.grad.mul_(0.5),
    "scaled behind autograd": lambda param: param.grad.data.mul_(0.5),
    "zeroed behind autograd": lambda param: param.grad.data.zero_(),
    "another tensor": lambda param: setattr(param, "grad", param.grad * 0.5),
    "clipped in part": lambda param: param.grad.data.clamp_(-1.0, 1.0),
    "an additional term": lambda param: (param.float() ** 2).sum().backward(),
    "a copy": lambda param: setattr(param, "grad", copy.deepcopy(param.grad)),
    "saved and loaded": lambda param: setattr(param, "grad", reloaded(param.grad)),
}
"""What people do to a gradient between two backward passes."""


def reloaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_the_fold_goes_on_from_what_was_written_into_the_gradient(uses, dtype, grad_dtype, change):
    param, buffers = tied(uses, dtype, grad_dtype)
    backward(param, buffers, slice(0, 64))
    before = param.grad.clone()
    CHANGES[change](param)
    changed = param.grad.clone()
    backward(param, buffers, slice(64, TOKENS))
    later = gradient_of(slice(64, TOKENS), uses, dtype, grad_dtype)
    assert same_bytes(changed, before) == (change in ("a copy", "saved and loaded"))
    if change.startswith("zeroed"):
        assert same_bytes(param.grad, later)
    assert_near(param.grad, changed + later)


@pytest.mark.parametrize("uses", [1, 2])
def test_without_a_look_at_the_gradient_what_was_written_into_it_is_not_seen(uses, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(
        gradient_buffer._Gradient, "_resumed", lambda self, left, _: left.accumulators
    )
    param, buffers = tied(uses, torch.bfloat16)
    backward(param, buffers, slice(0, 64))
    param.grad.data.zero_()
    backward(param, buffers, slice(64, TOKENS))
    assert same_bytes(param.grad, gradient_of(ALL, uses, torch.bfloat16))


def test_what_was_not_written_to_goes_on_with_all_its_digits():
    param = parameter(torch.bfloat16)
    whole = gradient_of(ALL, 1, torch.bfloat16)
    buffer = GradientBuffer(param)
    backward(param, [buffer], slice(0, 64))
    param.grad.data[:12] = 0.0
    backward(param, [buffer], slice(64, TOKENS))
    assert same_bytes(param.grad[12:], whole[12:])
    assert not same_bytes(param.grad[:12], whole[:12])


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_gradient_stays_the_same_tensor_in_the_same_memory(uses, dtype, grad_dtype):
    whole = parameter(dtype, grad_dtype)
    backward(whole, GradientBuffer.for_uses(whole, uses), ALL)
    for held in (True, False):
        param, flat = parameter(dtype, grad_dtype), torch.zeros(1000, dtype=grad_dtype)
        param.grad = flat[:960].view(24, 40)
        others = [param.grad] if held else []
        buffers = GradientBuffer.for_uses(param, uses)
        for span in spans([32, 48]):
            backward(param, buffers, span)
            assert all(param.grad is other for other in others)
        assert same_bytes(flat[:960].view(24, 40), whole.grad)
        assert param.grad.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_that_a_pass_forgets_is_replaced_and_its_memory_not_filled(uses, monkeypatch):
    """Negative control."""
    real = gradient_buffer._Gradient._continue

    def forgetful(self, gradient):
        real(self, gradient)
        self._before = self.parameter.grad = None

    monkeypatch.setattr(gradient_buffer._Gradient, "_continue", forgetful)
    param, flat = parameter(torch.bfloat16), torch.zeros(960, dtype=torch.bfloat16)
    param.grad = given = flat.view(24, 40)
    backward(param, GradientBuffer.for_uses(param, uses), ALL)
    assert param.grad is not given and not flat.any()


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_gradient_in_another_layout_is_continued(uses, dtype, grad_dtype):
    param = parameter(dtype, grad_dtype)
    param.grad = torch.zeros(40, 24, dtype=grad_dtype).t()
    buffers = GradientBuffer.for_uses(param, uses)
    for span in spans([32, 48]):
        backward(param, buffers, span)
    assert same_bytes(param.grad.contiguous(), gradient_of(ALL, uses, dtype, grad_dtype))


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_term_beside_the_folds_is_added(uses, dtype, grad_dtype):
    param, terms, alone = (parameter(dtype, grad_dtype) for _ in range(3))
    backward(alone, GradientBuffer.for_uses(alone, uses), ALL)
    buffers = GradientBuffer.for_uses(param, uses)
    for p, folds in ((param, loss(param, buffers, ALL)), (terms, 0.0)):
        (folds + (p.float() ** 2).sum()).backward()
    assert_near(param.grad, alone.grad + terms.grad)


def test_a_gradient_that_is_the_folds_alone_loses_a_term_beside_them(monkeypatch):
    """Negative control."""
    real = gradient_buffer._Gradient.publish

    def of_the_folds(self):
        gradient_buffer.add_up(self._accumulators, self.parameter.grad)
        return real(self)

    monkeypatch.setattr(gradient_buffer._Gradient, "publish", of_the_folds)
    param = parameter()
    (loss(param, GradientBuffer.for_uses(param, 2), ALL) + (param**2).sum()).backward()
    assert same_bytes(param.grad, gradient_of(ALL, 2))


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_gradient_that_was_there_first_is_continued(uses, dtype, grad_dtype):
    param = nn.Parameter(torch.zeros(3, dtype=dtype))
    param.grad_dtype = grad_dtype
    param.grad = torch.tensor([1.0, -2.0, 3.0], dtype=grad_dtype)
    buffers = GradientBuffer.for_uses(param, uses)
    for _ in range(2):
        sum(use(param, buffer, lambda g, fresh: g.add_(10.0)) for buffer in buffers).backward()
    assert param.grad.tolist() == [1.0 + 20 * uses, -2.0 + 20 * uses, 3.0 + 20 * uses]


@pytest.mark.parametrize("uses", [1, 2])
def test_zeros_that_a_hook_is_added_to_count_as_none(uses):
    param, seen = parameter(), []
    param.register_hook(lambda g: g * 0.5)
    buffers = GradientBuffer.for_uses(param, uses)
    for _ in range(3):
        backward(param, buffers, ALL)
        seen.append(param.grad.clone())
        param.grad.zero_()
    assert same_bytes(seen[0], seen[1]) and same_bytes(seen[0], seen[2])


def test_a_view_that_a_hook_puts_in_place_of_the_gradient_stays():
    """As DDP does with its buckets."""
    param, bucket = parameter(), torch.zeros(1000)
    view = bucket[:960].view(24, 40)
    buffer = GradientBuffer(param)
    backward(param, [buffer], slice(0, 64))
    param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", view.copy_(p.grad)))
    backward(param, [buffer], slice(64, TOKENS))
    assert param.grad is view and same_bytes(view, gradient_of())


@pytest.mark.parametrize(("uses", "later"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_another_model_that_uses_the_weight_more_or_less_often_goes_on(
    uses, later, dtype, grad_dtype
):
    param = parameter(dtype, grad_dtype)
    backward(param, GradientBuffer.for_uses(param, uses), slice(0, 64))
    before = param.grad.clone()
    backward(param, GradientBuffer.for_uses(param, later), slice(64, TOKENS))
    assert_near(param.grad, before + gradient_of(slice(64, TOKENS), later, dtype, grad_dtype))
