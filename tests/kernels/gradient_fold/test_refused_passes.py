"""What does not go backward: several forward passes, restored patches, graphs, second threads."""

import contextlib
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_consistency.kernels.gradient_fold import gradient_buffer
from rl_consistency.kernels.gradient_fold.gradient_buffer import (
    BackwardPasses,
    ForwardPass,
    GradientBuffer,
)
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.gradient_fold.uses import (
    ALL,
    TOKENS,
    backward,
    gradient_of,
    loss,
    parameter,
    spans,
    tied,
    use,
)


@pytest.mark.parametrize("uses", [1, 2])
def test_several_forward_passes_in_one_backward_are_refused(uses):
    param, buffers = tied(uses)
    together = loss(param, buffers, slice(0, 64)) + loss(param, buffers, slice(64, TOKENS))
    with pytest.raises(ValueError, match="several forward passes.*Call backward.. for each"):
        together.backward()
    param.grad = None
    backward(param, buffers, ALL)
    assert same_bytes(param.grad, gradient_of(ALL, uses))


@pytest.fixture
def unrefused(monkeypatch):
    """What folds a use twice in one pass is let through."""
    real = gradient_buffer._Gradient._enter

    def enter(self, use, accumulates):
        with contextlib.suppress(ValueError):
            real(self, use, accumulates)

    monkeypatch.setattr(gradient_buffer._Gradient, "_enter", enter)


def test_without_the_refusal_gradients_depend_on_the_cut(unrefused):
    """Negative control: autograd adds up what each forward pass hands over."""
    gradients = []
    for cuts in ([], [64]):
        param = parameter()
        buffers = GradientBuffer.for_uses(param, 1)
        sum(loss(param, buffers, span) for span in spans(cuts)).backward()
        gradients.append(param.grad)
    assert not same_bytes(*gradients)


WRITES = {
    "scaled": lambda param: param.grad.mul_(2.0),
    "zeroed": lambda param: param.grad.zero_(),
    "another tensor": lambda param: setattr(param, "grad", param.grad * 2.0),
    "dropped": lambda param: setattr(param, "grad", None),
    "a term of a reentrant checkpoint": lambda param: (param.float() ** 2).sum().backward(),
}


def written_between_two_uses(write):
    """The gradient of a tied weight, continued by a pass between whose folds something writes."""
    param, x = parameter(torch.bfloat16), torch.zeros(1, requires_grad=True)
    buffers = GradientBuffer.for_uses(param, 2)
    backward(param, buffers, ALL)
    last = use(param, buffers[1], lambda g, fresh: g.add_(1.0), x)

    def between(gradient):
        with torch.enable_grad():
            write(param)

    last.register_hook(between)
    use(param, buffers[0], lambda g, fresh: g.add_(1.0), last).backward()
    return param.grad


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_between_two_uses_of_a_tied_weight_is_refused(write):
    with pytest.raises(ValueError, match=r"written or replaced.*two of its uses.*zero_grad"):
        written_between_two_uses(WRITES[write])


@pytest.mark.parametrize("write", WRITES)
def test_without_the_refusal_what_is_written_between_two_uses_is_lost(write, monkeypatch):
    """Negative control."""
    untouched = written_between_two_uses(lambda param: None)
    monkeypatch.setattr(gradient_buffer._Gradient, "_written_beside", False)
    assert same_bytes(written_between_two_uses(WRITES[write]), untouched)


def test_gradients_in_one_buffer_may_be_written_between_two_uses_of_a_tied_weight():
    """They share a version with the gradient of the tied weight."""
    passes, flat = BackwardPasses(), torch.zeros(2, 24, 40)
    params = parameter(), parameter()
    tied, (other,) = (
        GradientBuffer.for_uses(p, n, passes) for p, n in zip(params, (2, 1), strict=True)
    )
    for p, part in zip(params, flat.unbind(), strict=True):
        p.grad = part.detach()
    for _ in range(2):
        last = use(params[0], tied[1], ones := lambda g, fresh: g.add_(1.0))
        between = use(params[1], other, ones, torch.zeros(1) + last)
        use(params[0], tied[0], ones, torch.zeros(1) + between).backward()
    assert (flat[0] == 4.0).all() and (flat[1] == 2.0).all()


def of_two_sessions():
    """The gradient of two forward passes, the first of which belongs to a restored session."""
    param, sessions = parameter(), (BackwardPasses(), BackwardPasses())
    buffers = [GradientBuffer.for_uses(param, 1, session) for session in sessions]
    losses = [loss(param, *given) for given in zip(buffers, spans([64]), strict=True)]
    sessions[0].close()
    sum(losses).backward()
    return param.grad


def test_forward_passes_of_two_sessions_do_not_go_backward_together():
    with pytest.raises(ValueError, match=r"restored between forward and backward.*with patch"):
        of_two_sessions()


def test_where_a_restored_session_goes_on_gradients_depend_on_the_cut(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(BackwardPasses, "close", lambda self: None)
    assert not same_bytes(of_two_sessions(), gradient_of())


def reentrant():
    """A layer, and its forward pass over a span: it folds in a graph of its own, and every forward
    pass shows in the outer one."""
    passes, layer = BackwardPasses(), parameter()
    (buffer,) = GradientBuffer.for_uses(layer, 1, passes)

    def forward(span):
        start = torch.zeros(1, requires_grad=True)
        hidden = checkpoint(lambda x: loss(layer, [buffer], span, x), start, use_reentrant=True)
        entered = ForwardPass()
        hidden.register_hook(lambda gradient: passes.enter_forward(entered))
        return hidden

    return layer, forward


def test_several_passes_under_reentrant_checkpointing_are_refused():
    _, forward = reentrant()
    forward(ALL).backward()
    forward(ALL).backward()
    with pytest.raises(ValueError, match=r"the model took part in several forward passes"):
        (forward(slice(0, 64)) + forward(slice(64, TOKENS))).backward()


def test_forward_passes_of_frozen_weights_may_go_backward_together():
    layer, forward = reentrant()
    together = forward(slice(0, 64)) + forward(slice(64, TOKENS))
    layer.requires_grad_(False)
    together.backward()
    assert layer.grad is None


def test_reentrant_passes_that_nobody_counts_depend_on_the_cut(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(BackwardPasses, "enter_forward", lambda self, forward: None)
    gradients = []
    for cuts in ([], [64]):
        layer, forward = reentrant()
        sum(map(forward, spans(cuts))).backward()
        gradients.append(layer.grad)
    assert not same_bytes(*gradients)


def with_a_second_thread():
    """A gradient of ones, into which a thread folds while the first is between two parameters; and
    the errors of that thread."""
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
    return params[1].grad, refusals


def test_a_second_thread_in_backward_is_refused():
    gradient, (refusal,) = with_a_second_thread()
    assert "several" in refusal and (gradient == 1.0).all()


def test_without_the_refusal_a_second_thread_adds_to_the_gradient(unrefused):
    """Negative control."""
    gradient, refusals = with_a_second_thread()
    assert not refusals and (gradient != 1.0).any()
