"""A canonical gradient is an ordinary one to autograd, hooks and optimizers, whatever the cut."""

import contextlib
import copy
import io
import itertools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rl_consistency.kernels.gradient_fold.backward_passes import BackwardPasses
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.parity.digest import first_difference
from rl_consistency.verify.mutants.perturbations import tied_weights_share_a_buffer
from rl_consistency.verify.probe import probe

TOKENS = 176
CUTS = ([], [16], [32, 48], [160], list(range(16, TOKENS, 16)), [48, 64, 144])
ALL = slice(0, TOKENS)


def same_bytes(a, b):
    return first_difference({"": a}, {"": b}) is None


def assert_near(a, b):
    """Up to some roundings of the largest values."""
    error = 4 * torch.finfo(a.dtype).eps * b.float().abs().max()
    torch.testing.assert_close(a, b, rtol=0.0, atol=float(error))


def spans(cuts):
    return [slice(a, b) for a, b in itertools.pairwise([0, *cuts, TOKENS])]


class Use(torch.autograd.Function):
    """0, with a gradient of `param` that `fold` folds."""

    @staticmethod
    def forward(ctx, x, param, buffer, fold, overwrites):
        ctx.given = (param, buffer, fold, overwrites)
        return param.new_zeros(()) + 0 * x.sum()

    @staticmethod
    def backward(ctx, _):
        param, buffer, fold, overwrites = ctx.given
        dx = torch.ones(1) if ctx.needs_input_grad[0] else None
        return dx, fold_parameter(ctx, param, buffer, fold, overwrites=overwrites), None, None, None


class Head(torch.autograd.Function):
    """0, of hidden states, with a gradient of an LM head that may be frozen."""

    @staticmethod
    def forward(ctx, hidden, weight, buffer, fold):
        ctx.given = (weight, buffer, fold)
        return hidden * 0.0

    @staticmethod
    def backward(ctx, _):
        weight, buffer, fold = ctx.given
        gradient = None
        if ctx.needs_input_grad[1]:
            gradient = fold_parameter(ctx, weight, buffer, fold)
        else:
            buffer.pass_by()
        return torch.ones(1), gradient, None, None


def use(param, buffer, fold, x=None, overwrites=False):
    return Use.apply(torch.zeros(1) if x is None else x, param, buffer, fold, overwrites)


def parameter(dtype=torch.float32, grad_dtype=None):
    param = nn.Parameter(probe((24, 40), dtype, seed=9))
    param.grad_dtype = grad_dtype or dtype
    return param


def data(uses):
    dy = [probe((TOKENS, 24), seed=10 + i) for i in range(uses)]
    return dy, [probe((TOKENS, 40), seed=20 + i) for i in range(uses)]


def loss(param, buffers, span, x=None):
    """A forward pass over a span of tokens that uses the parameter once per buffer."""
    dys, xs = data(len(buffers))
    return sum(
        use(param, buffer, lambda g, fresh, dy=dy, x=xs: fold_outer(g, dy[span], x[span]), x)
        for buffer, dy, xs in zip(buffers, dys, xs, strict=True)
    )


def backward(param, buffers, span):
    loss(param, buffers, span).backward()


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_the_cut_into_backward_passes_changes_no_byte(uses, dtype, grad_dtype):
    gradients = []
    for cuts in CUTS:
        param = parameter(dtype, grad_dtype)
        buffers = GradientBuffer.for_uses(param, uses)
        for span in spans(cuts):
            backward(param, buffers, span)
        gradients.append(param.grad)
    assert gradients[0].dtype == grad_dtype
    assert all(same_bytes(gradient, gradients[0]) for gradient in gradients)


def test_gradients_that_autograd_adds_up_fail_the_same_check():
    gradients = []
    for cuts in CUTS:
        param = parameter(torch.bfloat16)
        for span in spans(cuts):
            backward(param, [None], span)
        gradients.append(param.grad)
    assert not all(same_bytes(gradient, gradients[0]) for gradient in gradients)


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
    whole, param = parameter(dtype, grad_dtype), parameter(dtype, grad_dtype)
    backward(whole, GradientBuffer.for_uses(whole, uses), slice(0, 64))
    param.register_hook(lambda g: g.mul_(0.5) if in_place else g * 0.5)
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64))
    assert same_bytes(param.grad, whole.grad * 0.5)
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
    param, other = parameter(dtype, grad_dtype), parameter(dtype, grad_dtype)
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64))
    before = param.grad.clone()
    (found,) = torch.autograd.grad(loss(param, buffers, slice(64, TOKENS)), param)
    backward(other, GradientBuffer.for_uses(other, uses), slice(64, TOKENS))
    assert same_bytes(found, other.grad) and same_bytes(param.grad, before)
    backward(param, buffers, slice(64, TOKENS))
    backward(whole := parameter(dtype, grad_dtype), GradientBuffer.for_uses(whole, uses), ALL)
    assert same_bytes(param.grad, whole.grad)


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


@pytest.mark.parametrize("uses", [1, 2])
def test_several_forward_passes_in_one_backward_are_refused(uses):
    param = parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    together = loss(param, buffers, slice(0, 64)) + loss(param, buffers, slice(64, TOKENS))
    with pytest.raises(ValueError, match="several forward passes.*once per forward pass"):
        together.backward()
    param.grad = None
    backward(param, buffers, ALL)
    backward(whole := parameter(), GradientBuffer.for_uses(whole, uses), ALL)
    assert same_bytes(param.grad, whole.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_passes_continue_the_same_fold(reentrant):
    whole, param = parameter(torch.bfloat16), parameter(torch.bfloat16)
    backward(whole, [GradientBuffer(whole)], ALL)
    buffer = GradientBuffer(param)
    for span in spans([32, 48]):
        x = torch.zeros(1, requires_grad=True)
        redone = lambda x, span=span: loss(param, [buffer], span, x)  # noqa: E731
        checkpoint(redone, x, use_reentrant=reentrant).backward()
    assert same_bytes(param.grad, whole.grad)


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
    param = parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, ALL)
    copied, copies = clone((param, buffers))
    copied.grad = None
    assert copies[0].parameter is copied
    backward(copied, copies, ALL)
    assert same_bytes(copied.grad, param.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_zero_grad_starts_afresh_and_what_came_before_may_be_scaled(uses, set_to_none, scale):
    param, fresh = parameter(), parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64))
    param.grad.mul_(scale)
    torch.optim.SGD([param], lr=0.1).zero_grad(set_to_none=set_to_none)
    backward(param, buffers, slice(64, TOKENS))
    backward(fresh, GradientBuffer.for_uses(fresh, uses), slice(64, TOKENS))
    assert same_bytes(param.grad, fresh.grad)


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
    param, later = parameter(dtype, grad_dtype), parameter(dtype, grad_dtype)
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64))
    before = param.grad.clone()
    CHANGES[change](param)
    changed = param.grad.clone()
    backward(param, buffers, slice(64, TOKENS))
    backward(later, GradientBuffer.for_uses(later, uses), slice(64, TOKENS))
    assert same_bytes(changed, before) == (change in ("a copy", "saved and loaded"))
    if change.startswith("zeroed"):
        assert same_bytes(param.grad, later.grad)
    assert_near(param.grad, changed + later.grad)


def test_what_was_not_written_to_goes_on_with_all_its_digits():
    whole, param = parameter(torch.bfloat16), parameter(torch.bfloat16)
    backward(whole, [GradientBuffer(whole)], ALL)
    buffer = GradientBuffer(param)
    backward(param, [buffer], slice(0, 64))
    param.grad.data[:12] = 0.0
    backward(param, [buffer], slice(64, TOKENS))
    assert same_bytes(param.grad[12:], whole.grad[12:])
    assert not same_bytes(param.grad[:12], whole.grad[:12])


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
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_gradient_in_another_layout_is_continued(uses, dtype, grad_dtype):
    whole, param = parameter(dtype, grad_dtype), parameter(dtype, grad_dtype)
    backward(whole, GradientBuffer.for_uses(whole, uses), ALL)
    param.grad = torch.zeros(40, 24, dtype=grad_dtype).t()
    buffers = GradientBuffer.for_uses(param, uses)
    for span in spans([32, 48]):
        backward(param, buffers, span)
    assert same_bytes(param.grad.contiguous(), whole.grad)


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_term_beside_the_folds_is_added(uses, dtype, grad_dtype):
    param, terms, alone = (parameter(dtype, grad_dtype) for _ in range(3))
    backward(alone, GradientBuffer.for_uses(alone, uses), ALL)
    buffers = GradientBuffer.for_uses(param, uses)
    for p, folds in ((param, loss(param, buffers, ALL)), (terms, 0.0)):
        (folds + (p.float() ** 2).sum()).backward()
    assert_near(param.grad, alone.grad + terms.grad)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_a_loss_that_some_uses_of_a_tied_weight_do_not_reach(dtype, grad_dtype, others):
    param, whole = parameter(dtype, grad_dtype), torch.zeros(24, 40)
    used, unused = GradientBuffer.for_uses(param, 2)
    (dy, _), (x, _) = data(2)
    fold = lambda g, fresh: fold_outer(g, dy, x)  # noqa: E731
    for _ in range(2):
        result = use(param, used, fold)
        (result + (param.float() * 0.0).sum() if others else result).backward()
        fold_outer(whole, dy, x)
        use(param, unused, fold)
    assert same_bytes(param.grad, whole.to(grad_dtype))
    with pytest.raises(ValueError, match="1 of the 2 uses"):
        torch.autograd.grad(use(param, used, fold), param)
    param.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="1 of the 2 uses"):
        use(param, used, fold).backward()


def test_a_parameter_frozen_since_the_forward_pass_keeps_its_gradient():
    param, x = parameter(), torch.zeros(1, requires_grad=True)
    buffer = GradientBuffer(param)
    backward(param, [buffer], slice(0, 64))
    before, later = param.grad.clone(), loss(param, [buffer], slice(64, TOKENS), x)
    param.requires_grad_(False)
    later.backward()
    assert same_bytes(param.grad, before)


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


def test_an_error_that_is_kept_does_not_keep_the_pass():
    """Its traceback holds the frames of the backward functions."""
    param, errors = parameter(), []
    buffer = GradientBuffer(param)

    def refuse(accumulator, fresh):
        raise torch.OutOfMemoryError("no memory")

    try:
        use(param, buffer, refuse).backward()
    except torch.OutOfMemoryError as error:
        errors.append(error)
    backward(param, [buffer], ALL)
    backward(whole := parameter(), [GradientBuffer(whole)], ALL)
    assert same_bytes(param.grad, whole.grad) and errors[0].__traceback__


def test_forward_passes_of_two_sessions_do_not_go_backward_together():
    """Each would continue the gradient that is there, and autograd would add it twice."""
    param, sessions = parameter(), (BackwardPasses(), BackwardPasses())
    first, second = (
        loss(param, GradientBuffer.for_uses(param, 1, session), ALL) for session in sessions
    )
    sessions[0].close()
    with pytest.raises(ValueError, match=r"restored between forward and backward.*with patch"):
        (first + second).backward()


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
def test_what_a_failed_pass_held_is_freed_before_the_next_forward(dtype, grad_dtype):
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
    passes.clear()
    assert len(held) == 2 and all(storage.expired() for storage in held)


@pytest.mark.parametrize("frozen", [True, False])
def test_several_passes_under_reentrant_checkpointing_are_refused(frozen):
    passes = BackwardPasses()
    layer, head = parameter(), parameter().requires_grad_(not frozen)
    (inner,), (outer,) = (GradientBuffer.for_uses(p, 1, passes) for p in (layer, head))
    dy, x = data(1)

    def forward(span):
        start = torch.zeros(1, requires_grad=True)
        hidden = checkpoint(lambda x: loss(layer, [inner], span, x), start, use_reentrant=True)
        return Head.apply(hidden, head, outer, lambda g, fresh: fold_outer(g, dy[0], x[0]))

    forward(ALL).backward()
    with pytest.raises(ValueError, match="several forward passes"):
        (forward(slice(0, 64)) + forward(slice(64, TOKENS))).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("uses", [1, 2])
def test_a_graph_of_the_backward_pass_may_be_made(uses, dtype):
    whole, param = parameter(dtype), parameter(dtype)
    backward(whole, GradientBuffer.for_uses(whole, uses), ALL)
    buffers = GradientBuffer.for_uses(param, uses)
    for span in spans([32, 48]):
        loss(param, buffers, span).backward(create_graph=True)
    assert same_bytes(param.grad, whole.grad)


def test_a_second_thread_in_backward_is_refused():
    """It comes while the first is between two parameters."""
    passes, params = BackwardPasses(), [parameter(), parameter()]
    buffers = [GradientBuffer.for_uses(p, 1, passes)[0] for p in params]
    refusals = []

    def other():
        try:
            backward(params[1], [buffers[1]], ALL)
        except ValueError as error:
            refusals.append(str(error))

    def fold(accumulator, fresh):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    x = torch.zeros(1, requires_grad=True)
    first = use(params[0], buffers[0], fold, x)
    use(params[1], buffers[1], lambda g, fresh: g.add_(1.0), first).backward()
    assert "several" in refusals[0] and (params[1].grad == 1.0).all()


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
    whole, param = parameter(), parameter()
    backward(whole, GradientBuffer.for_uses(whole, uses), slice(0, 64))
    filled = torch.zeros_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: filled(*a, **k).fill_(float("nan")))
    for i, buffer in enumerate(GradientBuffer.for_uses(param, uses)):
        fold = lambda g, fresh, i=i: fold_outer(g, dy[i][:64], x[i][:64], fresh=fresh)  # noqa: E731
        use(param, buffer, fold, overwrites=True).backward()
    assert same_bytes(param.grad, whole.grad)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_fold_that_fails_is_begun_anew_after_zero_grad_alone(uses):
    param, whole = parameter(), parameter()
    buffers = GradientBuffer.for_uses(param, uses)
    backward(param, buffers, slice(0, 64))

    def refuse(accumulator, fresh):
        accumulator.add_(1.0)
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        use(param, buffers[0], refuse).backward()
    with pytest.raises(ValueError, match=r"ended in an error.*zero_grad"):
        backward(param, buffers, slice(64, TOKENS))
    param.grad = None
    backward(param, buffers, ALL)
    backward(whole, GradientBuffer.for_uses(whole, uses), ALL)
    assert same_bytes(param.grad, whole.grad)


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
