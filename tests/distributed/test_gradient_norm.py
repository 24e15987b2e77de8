"""The norm of a sharded gradient: the same bits under any sharding, and as exact as fp64."""

import math

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.distributed.gradient_norm import sharded_gradient_norm
from rl_consistency.distributed.world import World
from rl_consistency.kernels.reduction.sums import gradient_norm

ALONE = World.join(torch.device("cpu"))


def gradients():
    return {
        "embed": probe((40, 33)),
        "norm": probe((17,), seed=1),
        "frozen": torch.zeros(4),
        "small": probe((30,), seed=2, scale=2**-20),
    }


def norm_of(tensors):
    return sharded_gradient_norm(ALONE, tensors, {n: t.numel() for n, t in tensors.items()})


def exact_norm(tensors):
    """Squares are exact in fp64; so is their sum, until it is rounded."""
    squares = (x * x for t in tensors.values() for x in t.double().flatten().tolist())
    return math.sqrt(math.fsum(squares))


def sharded(world, cut):
    """Each rank has a run of every flattened gradient; `cut` decides which."""
    wholes, parts = gradients(), {}
    for name, whole in wholes.items():
        flat = whole.flatten()
        if cut == "even":
            part = torch.tensor_split(flat, world.size)[world.rank]
        elif cut == "strided":
            part = flat[world.rank :: world.size]
        else:
            part = flat if world.rank == world.size - 1 else flat[:0]
        if len(part) or cut == "even":
            parts[name] = part
    return sharded_gradient_norm(world, parts, {n: t.numel() for n, t in wholes.items()})


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("cut", ["even", "strided", "last rank"])
def test_the_same_bits_under_any_sharding(run_ranks, world_size, cut):
    assert run_ranks(world_size, sharded, cut) == [norm_of(gradients())] * world_size


def norm_over_shards(world):
    parts = [torch.tensor_split(t.flatten(), world.size)[world.rank] for t in gradients().values()]
    squares = gradient_norm(parts) ** 2
    if world.size > 1:
        torch.distributed.all_reduce(squares)
    return float(squares.sqrt())


def test_a_norm_over_shards_turns_the_check_red(run_ranks):
    assert len({run_ranks(world_size, norm_over_shards)[0] for world_size in (1, 2, 3)}) > 1


def test_it_is_exact_for_values_of_any_size():
    assert norm_of(gradients()) == exact_norm(gradients())
    extremes = {"denormal": torch.full((3,), 1e-45), "largest": torch.tensor([3.4e38, -3.4e38])}
    for name, gradient in (gradients() | extremes).items():
        one = {name: gradient}
        assert norm_of(one) == exact_norm(one)


def with_values(world, at):
    part = torch.ones(3)
    if world.rank in at:
        part[1] = at[world.rank]
    return sharded_gradient_norm(world, {"a": part}, {"a": 3 * world.size, "b": 2})


INFINITE = [{1: math.inf}, {1: -math.inf}, {0: -math.inf, 1: math.inf}]
NAN = [{0: math.nan}, {1: math.nan}, {0: math.inf, 1: math.nan}]


@pytest.mark.parametrize("at", [*INFINITE, *NAN])
def test_a_non_finite_gradient_gives_that_norm_on_every_rank(run_ranks, at):
    norm = "inf" if at in INFINITE else "nan"
    assert [str(found) for found in run_ranks(2, with_values, at)] == [norm] * 2


def test_the_norm_of_nothing_is_zero():
    assert norm_of({}) == 0.0
    assert norm_of({"a": torch.zeros(0), "b": torch.zeros(3)}) == 0.0
    assert sharded_gradient_norm(ALONE, {}, {"a": 4}) == 0.0


def test_bad_parts_are_refused_by_name():
    with pytest.raises(TypeError, match="a must be torch.float32, got torch.bfloat16"):
        norm_of({"a": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="numels lacks 'b'"):
        sharded_gradient_norm(ALONE, {"b": torch.ones(2)}, {"a": 2})
