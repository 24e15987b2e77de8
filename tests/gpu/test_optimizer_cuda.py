"""An element's update must not depend on the tensor it is updated in."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.strategy import Replicated

pytestmark = pytest.mark.gpu

SIZE = 3 * 65_536 + 1027
CUTS = (1, 3, 130, 65_536, 65_539, SIZE)
"""Ends of slices: unaligned ones, single elements, and more than one chunk of the fused kernel."""


def lifelike(seed, size=SIZE):
    """Normal values over a wide exponent range."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    spread = torch.randint(-20, 4, (size,), generator=generator, dtype=torch.int32)
    return torch.ldexp(values, spread).cuda()


def stepped(parameters, gradients, steps=3, **variant):
    """The parameters and both moments after some steps."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **variant)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient * (step + 1)
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    return [
        torch.cat([p.detach() for p in parameters]),
        *(torch.cat([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")),
    ]


def bits(tensors):
    return [t.view(torch.int32).cpu() for t in tensors]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(bits(left), bits(right), strict=True))


def in_slices(values):
    return [values[a:b].clone() for a, b in pairwise((0, *CUTS))]


@pytest.mark.parametrize("variant", [{"fused": True}, {"foreach": False}, {"foreach": True}])
def test_a_step_of_slices_is_a_step_of_the_whole(variant):
    values, gradients = lifelike(0), lifelike(1)
    whole = stepped([nn.Parameter(values.clone())], [gradients], **variant)
    sliced = stepped(
        [nn.Parameter(part) for part in in_slices(values)], in_slices(gradients), **variant
    )
    assert equal(whole, sliced)


def test_a_step_of_misaligned_storage_is_the_same_step():
    values, gradients = lifelike(2), lifelike(3)
    whole = stepped([nn.Parameter(values.clone())], [gradients], fused=True)
    room = torch.empty(SIZE + 1, device="cuda")
    room[1:] = values
    shifted = stepped([nn.Parameter(room[1:])], [gradients], fused=True)
    assert equal(whole, shifted)


def test_the_comparison_sees_one_last_bit():
    """Negative control: a gradient that is scaled in two steps rounds otherwise."""
    values, gradients = lifelike(6), lifelike(7)
    whole = stepped([nn.Parameter(values.clone())], [gradients], fused=True)
    rescaled = stepped([nn.Parameter(values.clone())], [gradients / 3 * 3], fused=True)
    assert not equal(whole, rescaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_loaded_from_its_tensors_goes_on_with_the_same_bits(dtype):
    section = OptimizerSection(learning_rate=1e-2, schedule="linear", warmup_steps=1)

    def policy():
        model = nn.Linear(37, 19, bias=False).to(device="cuda", dtype=dtype)
        with torch.no_grad():
            model.weight.copy_(lifelike(8, 37 * 19).view(19, 37))
        model.weight.grad_dtype = torch.float32
        ranks = Replicated(World.join(torch.device("cuda")), PartOrder(1), model)
        return model, PolicyOptimizer(ranks, section, total_steps=6)

    def steps(model, optimizer, which):
        for step in which:
            model.weight.grad = lifelike(10 + step, 37 * 19).view(19, 37)
            optimizer.step()

    model, optimizer = policy()
    steps(model, optimizer, range(2))
    saved = {name: tensor.cpu() for name, tensor in optimizer.tensors().items()}
    schedule, weight = optimizer.schedule_state(), model.weight.detach().clone()
    steps(model, optimizer, range(2, 4))

    resumed, other = policy()
    with torch.no_grad():
        resumed.weight.copy_(weight)
    other.load(saved, schedule)
    steps(resumed, other, range(2, 4))
    assert torch.equal(model.weight, resumed.weight)
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
