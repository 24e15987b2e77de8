"""A fold that goes on in a later pass, on a GPU: all gradients together as each one alone."""

import pytest
import torch

from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses, GradientBuffer
from rl_consistency.kernels.gradient_fold.resume_triton import Resumed, resume_accumulators
from rl_consistency.kernels.linear.op import linear
from tests.gpu.kernels.gradient_fold.gradient_fold_cases import (
    TOKENS,
    K,
    N,
    data,
    operands,
    same_bytes,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_fold_is_resumed_as_torch_would(wide, dtype, two):
    parts = [data((513, 77), torch.float32, seed=seed).to(wide) / 3 for seed in range(1 + two)]
    gradient = sum(parts).to(dtype)
    gradient[::3] *= 2
    gradient[5, 5] = float("nan")
    same = sum(parts).to(dtype) == gradient
    wanted = [torch.where(same, parts[0], gradient.to(wide))]
    wanted += [torch.where(same, part, 0.0) for part in parts[1:]]
    resume_accumulators([Resumed(gradient, *parts)])
    assert all(same_bytes(a, b) for a, b in zip(parts, wanted, strict=True))


CHANGES = {
    "nothing": lambda gradient: None,
    "scaled in place": lambda gradient: gradient.mul_(0.5),
    "behind torch's back": lambda gradient: gradient.data[::2].mul_(0.5),
    "not a number": lambda gradient: gradient.data.flatten()[3].fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_resumed_together_as_each_alone(dtype, change, monkeypatch):
    def trained():
        dy, x = operands(torch.bfloat16)
        passes = BackwardPasses()
        weights = [torch.nn.Parameter(data((N, K), torch.bfloat16, seed=s)) for s in range(3)]
        for weight in weights:
            weight.grad_dtype = dtype
        uses = [GradientBuffer.for_uses(w, 1 + i % 2, passes) for i, w in enumerate(weights)]
        for step, span in enumerate((slice(0, 512), slice(512, 800), slice(800, TOKENS))):
            # The last weight takes no part in the second pass.
            part = [*zip(weights, uses, strict=True)][: 2 if step == 1 else 3]
            outputs = [linear(x[span], w, weight_grad=use) for w, own in part for use in own]
            torch.autograd.backward(outputs, [dy[span]] * len(outputs))
            for weight in weights:
                CHANGES[change](weight.grad)
        return [weight.grad for weight in weights]

    together = trained()
    monkeypatch.setattr(BackwardPasses, "resume_once", lambda self: None)
    assert all(same_bytes(a, b) for a, b in zip(together, trained(), strict=True))
