"""A parameter that a test folds a gradient of, and what folds it."""

import itertools

import torch
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold import gradient_buffer
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import fold_outer

TOKENS = 176

CUTS = ([], [16], [32, 48], [160], list(range(16, TOKENS, 16)), [48, 64, 144])

ALL = slice(0, TOKENS)


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


def tied(uses=1, *dtypes):
    """A parameter and a buffer for each of its uses."""
    param = parameter(*dtypes)
    return param, GradientBuffer.for_uses(param, uses)


def gradient_of(span=ALL, uses=1, *dtypes):
    """The gradient of one pass over a span."""
    param, buffers = tied(uses, *dtypes)
    backward(param, buffers, span)
    return param.grad


def hold_ends(monkeypatch):
    """A list that keeps the ends of passes alive, as a thread of autograd's does."""
    held = []

    class Held(gradient_buffer._End):
        def __init__(self, passes):
            super().__init__(passes)
            held.append(self)

    monkeypatch.setattr(gradient_buffer, "_End", Held)
    return held


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
