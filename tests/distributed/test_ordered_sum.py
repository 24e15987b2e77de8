"""The sum over leaves has the bits of a plain left fold on one to four ranks; mutants have not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import GradientBuckets, OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.verify.mutants.sums import (
    ContiguousLeaves,
    LowPrecision,
    OtherRankOrder,
    RankApart,
    StockSum,
)


class FillerAdded(OrderedSum):
    """A rank without a part sends its zeros."""

    def __init__(self, world, order):
        super().__init__(world, order)
        self.rounds = [replace(r, senders=world.size) for r in self.rounds]


SHAPES = {"embed": (7, 5), "norm": (5,), "up": (6, 4), "head": (11,)}
SEQUENCES = 17
WORLDS = (1, 2, 3, 4)
ALONE = World.join(torch.device("cpu"))


def leaf_gradients(sequences):
    """What one leaf computes: a fold from zero over its sequences."""
    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for sequence in sequences:
        for seed, (name, shape) in enumerate(SHAPES.items()):
            found[name] += probe(shape, seed=10 * sequence + seed)
    found["head"][0] = -0.0  # an underflow, say: adding a filler's +0 would turn it
    return found


def left_fold(parts):
    first, *others = parts
    total = {name: value.clone() for name, value in first.items()}
    for other in others:
        for name in total:
            total[name] = total[name] + other[name]
    return total


def reference(order):
    leaves = [leaf_gradients(leaf) for leaf in order.parts(SEQUENCES)]
    groups = [leaves[i : i + order.inner] for i in range(0, order.count, order.inner)]
    return parameter_digest(left_fold([left_fold(group) for group in groups]))


def step(world, order, total_type=OrderedSum, bucket_bytes=100, filler=True):
    """The digest of one optimizer step's gradients, gathered from parts that cover them once."""
    buckets = GradientBuckets(total_type(world, order), SHAPES, bucket_bytes=bucket_bytes)
    for round in buckets.step():
        gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        if round.part is not None:
            gradients = leaf_gradients(order.parts(SEQUENCES)[round.part])
        if round.part is not None or filler:
            for name in ("up", "head", "norm", "embed"):  # not the order of the buckets
                buckets.put(name, gradients[name])
    parts = buckets.take()
    sizes = sum(part.numel() for part in parts.values())
    assert sum(world.gather("sizes", sizes)) == sum(torch.zeros(s).numel() for s in SHAPES.values())
    return parameter_digest(dict(buckets.gather()))


def digests(run_ranks, order, *arguments, worlds=WORLDS, **options):
    """The digests that any rank of any world found."""
    found = set()
    for world_size in worlds:
        found.update(run_ranks(world_size, step, order, *arguments, **options))
    return found


@pytest.mark.parametrize("leaves", [4, 5])
def test_the_bits_are_those_of_the_left_fold_on_any_number_of_ranks(run_ranks, leaves):
    assert digests(run_ranks, PartOrder(leaves)) == {reference(PartOrder(leaves))}


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_groups_have_the_bits_of_their_fold_on_any_nodes(run_ranks, ranks_per_node):
    order = PartOrder(2, 3)
    found = digests(run_ranks, order, ranks_per_node=ranks_per_node)
    assert found == {reference(order)} != {reference(PartOrder(6))}


def test_groups_that_the_ranks_do_not_divide(run_ranks):
    order = PartOrder(3, 3)  # two groups of two ranks: the last round of each level has filler
    assert run_ranks(4, step, order, ranks_per_node=2) == [reference(order)] * 4


@pytest.mark.parametrize("filler", [True, False])
def test_buckets_do_not_matter_nor_what_a_rank_without_a_leaf_gives(run_ranks, filler):
    for bucket_bytes in (1, 100, 10_000):
        found = run_ranks(3, step, PartOrder(4), OrderedSum, bucket_bytes, filler)
        assert found == [reference(PartOrder(4))] * 3


IN_TWO = dict.fromkeys((OtherRankOrder, LowPrecision, RankApart), (2,))
MUTANTS = {StockSum: (2, 4), ContiguousLeaves: (2, 4), FillerAdded: (3,), **IN_TWO}
"""With the worlds in which the mutant is tried."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_turns_the_check_red(run_ranks, mutant):
    found = digests(run_ranks, PartOrder(4), mutant, worlds=MUTANTS[mutant])
    assert found - {reference(PartOrder(4))}


def tied_to_ranks(world, order):
    return step(world, PartOrder(world.size))


def test_leaves_tied_to_ranks_turn_the_check_red(run_ranks):
    found = {run_ranks(world_size, tied_to_ranks, PartOrder(4))[0] for world_size in WORLDS}
    assert len(found) == 4


def with_hooks(world, order, bucket_bytes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    buckets = GradientBuckets(OrderedSum(world, order), shapes, bucket_bytes=bucket_bytes)
    last = False

    def give(name):
        def hook(parameter):
            if last:
                buckets.put(name, parameter.grad)
                parameter.grad = None

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(give(name))
    gradients = {}
    for _ in range(2):  # a second step starts from nothing
        for round in buckets.step():
            batches = order.micro_batches(SEQUENCES, round.part, 1)
            for i, batch in enumerate(batches):
                last = i == len(batches) - 1
                inputs = probe((3, 5), seed=batch.start)
                model(inputs).square().sum().mul(float(bool(batch))).backward()
        buckets.take()
        gradients = dict(buckets.gather())
    return parameter_digest(gradients)


def test_hooks_fill_buckets_during_the_backward_pass(run_ranks):
    order = PartOrder(4)
    expected = with_hooks(ALONE, order, 10_000)
    for world_size in (2, 3):
        for bucket_bytes in (1, 200):
            found = run_ranks(world_size, with_hooks, order, bucket_bytes)
            assert found == [expected] * world_size


def with_a_gradient_missing(world, bucket_bytes):
    order = PartOrder(5)
    buckets = GradientBuckets(OrderedSum(world, order), SHAPES, bucket_bytes=bucket_bytes)
    for round in buckets.step():
        for name, gradient in leaf_gradients([0]).items():
            if name != "norm" or (world.rank, round.index) != (1, 1):
                buckets.put(name, gradient)
    try:
        buckets.take()
    except ConsistencyError as error:
        first = str(error)
    # The next step is whole again.
    for _ in buckets.step():
        for name, gradient in leaf_gradients([0]).items():
            buckets.put(name, gradient)
    buckets.take()
    return first, all(bool(g.isfinite().all()) for g in dict(buckets.gather()).values())


@pytest.mark.parametrize("bucket_bytes", [1, 100])
def test_a_gradient_missing_on_one_rank_is_named_on_every_rank(run_ranks, bucket_bytes):
    for first, finite in run_ranks(3, with_a_gradient_missing, bucket_bytes):
        assert first.startswith("rank 1 has no gradient of norm (leaf 4). No weight was changed")
        assert finite


def test_bad_gradients_are_refused_by_name():
    buckets = GradientBuckets(OrderedSum(ALONE, PartOrder(1)), SHAPES)
    next(buckets.step())
    buckets.put("head", torch.zeros(11))
    for name, gradient, message in (
        ("nose", torch.zeros(5), r"nose, \[5\], is not expected.*no such parameter"),
        ("norm", torch.zeros(5).bfloat16(), "norm must be torch.float32, got torch.bfloat16"),
        ("norm", torch.zeros(4), r"norm, \[4\], is not expected.*its shape is \[5\]"),
        ("head", torch.zeros(11), "head, .* gives one per leaf"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            buckets.put(name, gradient)
    total = OrderedSum(ALONE, PartOrder(1))
    next(total.step())
    with pytest.raises(TypeError, match="x must be torch.float32, got torch.float64"):
        total.add("x", torch.zeros(3).double())
    with pytest.raises(ValueError, match="x must be a vector"):
        total.add("x", torch.zeros(3, 3))


def test_a_sum_is_taken_once_every_round_has_added_to_it():
    total = OrderedSum(ALONE, PartOrder(2))
    rounds = total.step()
    next(rounds)
    total.add("x", torch.ones(3))
    with pytest.raises(ValueError, match="gradient x was added in 1 of 2 rounds"):
        total.take("x")
    next(rounds)
    total.add("x", torch.ones(3))
    assert total.take("x").tolist() == [2, 2, 2]  # in the last round, as FSDP2 asks for it


def test_an_unfinished_step_leaves_nothing():
    buckets = GradientBuckets(OrderedSum(ALONE, PartOrder(2)), {"norm": (5,)})
    next(buckets.step())
    buckets.put("norm", torch.full((5,), torch.inf))
    for _ in buckets.step():
        buckets.put("norm", torch.ones(5))
    assert buckets.take()["norm"].tolist() == [2] * 5


def test_one_process_with_one_leaf_keeps_the_gradient_it_was_given():
    gradient = probe((5,))
    buckets = GradientBuckets(OrderedSum(ALONE, PartOrder(1)), {"norm": (5,)})
    for _ in buckets.step():
        buckets.put("norm", gradient)
    buckets.take()
    assert dict(buckets.gather())["norm"].data_ptr() == gradient.data_ptr()
