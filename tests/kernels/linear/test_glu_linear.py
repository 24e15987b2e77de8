"""The down projection of a gated MLP: the bytes of `glu` and `linear`, less kept memory."""

import pytest
import torch
from torch import nn

from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear import op as glu_linear_module
from rl_consistency.kernels.linear.op import glu_linear, linear
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.parity.bytes import same_bytes

ROWS, K, N = 75, 160, 48


def operands(dtype=torch.bfloat16, shape=(ROWS,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((*shape, K), (*shape, K), (N, K), (N,), (*shape, N))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def apart(gate, up, weight, bias, activation="silu", **buffers):
    return linear(glu(gate, up, activation), weight, bias, **buffers)


def results(op, given, dy, activation="silu", frozen=()):
    leaves = [
        None if x is None else x.clone().requires_grad_(i not in frozen)
        for i, x in enumerate(given)
    ]
    y = op(*leaves, activation)
    y.backward(dy)
    return [y.detach(), *(x.grad for x in leaves if x is not None and x.requires_grad)]


@pytest.mark.parametrize("frozen", [(0, 1), (2,), (2, 3), (0,), (1, 3)])
def test_what_is_frozen_has_no_gradient(frozen):
    *given, dy = operands()
    expected, actual = (results(op, given, dy, frozen=frozen) for op in (apart, glu_linear))
    assert len(actual) == 5 - len(frozen)
    assert all(map(same_bytes, expected, actual))


def test_a_frozen_weight_asks_for_no_values(monkeypatch):
    """They would be a tensor of R x K that nobody reads."""
    *given, dy = operands()
    expected = results(apart, given, dy, frozen=(2, 3))

    def unwanted(*_):
        raise AssertionError("values of glu in backward")

    monkeypatch.setattr(glu_linear_module, "glu_gradients_and_values", unwanted)
    assert all(map(same_bytes, results(glu_linear, given, dy, frozen=(2, 3)), expected))
    with pytest.raises(AssertionError, match="values of glu"):
        results(glu_linear, given, dy)


def test_buffers_are_continued_over_micro_batches():
    *given, dy = operands()
    found = []
    for op in (apart, glu_linear):
        weight, bias = (nn.Parameter(x.clone()) for x in given[2:])
        weight.grad_dtype = bias.grad_dtype = torch.float32
        buffers = {"weight_grad": GradientBuffer(weight), "bias_grad": GradientBuffer(bias)}
        for rows in (slice(0, 30), slice(30, ROWS)):
            gate, up = (x[rows].requires_grad_() for x in given[:2])
            op(gate, up, weight, bias, **buffers).backward(dy[rows])
        found.append((weight.grad, bias.grad))
    assert all(map(same_bytes, *found))
    whole = results(apart, given, dy)
    assert found[0][0].dtype == torch.float32
    assert same_bytes(found[0][0].bfloat16(), whole[3])  # no cut moves a bit


def kept_bytes(op, given):
    kept = {}

    def note(x):
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        op(*(x.clone().requires_grad_() for x in given))
    return sum(kept.values())


def test_the_values_of_glu_are_not_kept():
    *given, _ = operands()
    assert kept_bytes(apart, given) - kept_bytes(glu_linear, given) == given[0].nbytes


def test_a_gate_that_was_written_to_is_refused():
    *given, dy = operands()
    leaves = [x.clone().requires_grad_() for x in given]
    gate = leaves[0] * 1
    y = glu_linear(gate, *leaves[1:])
    with torch.no_grad():
        gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_bad_operands_are_refused():
    gate, up, weight, bias, _ = operands()
    with pytest.raises(ValueError, match=r"glu: gate \(75, 160\) and up \(74, 160\)"):
        glu_linear(gate, up[1:], weight, bias)
    with pytest.raises(ValueError, match="activation 'relu'; allowed"):
        glu_linear(gate, up, weight, bias, "relu")
    with pytest.raises(ValueError, match="glu_linear: x .* does not fit weight"):
        glu_linear(gate, up, weight[:, 1:], bias)
    with pytest.raises(TypeError, match="weight is torch.float32"):
        glu_linear(gate, up, weight.float(), bias)
