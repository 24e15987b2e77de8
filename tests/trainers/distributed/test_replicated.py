"""The weights do not depend on how many processes trained them; each control makes them depend."""

import os
import shutil
import signal
import sys

import pytest
import torch

from rl_consistency.distributed.world import CollectiveError
from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints
from rl_consistency.trainers.run_directory.metrics_file import read_metrics
from rl_consistency.trainers.strategies import build, replicated, strategy
from tests.distributed.test_ordered_sum import (
    ContiguousLeaves,
    LowPrecision,
    OtherRankOrder,
    StockAllReduce,
    StockSum,
)
from tests.trainers.distributed.runs import LEAVES, digest_of, digests

EVERYTHING = {
    **LEAVES,
    "training.eval_every": 1,
    "warm_start.steps": 2,
    "warm_start.batch_size": 5,
    "algorithm.kl_coefficient": 0.05,
    "algorithm.loss": "dapo",
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 1,
    "consistency.gradient_check_every": 2,
}


MICRO_BATCHES = {1: (1, 2), 2: (2,), 3: (1,), 4: (2,)}
"""Number of processes -> sizes."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_hash_and_one_set_of_metrics_for_any_number_of_processes(
    run_ranks, tiny_run, lasting, dtype
):
    found, rows, steps = set(), [], set()
    for world_size, sizes in MICRO_BATCHES.items():
        directories = [tiny_run.directory / f"run {world_size} {size}" for size in sizes]
        trees = [
            tiny_run.tree(
                **EVERYTHING
                | {"policy.dtype": dtype, "run.output_dir": str(directory)}
                | {"training.micro_batch_size": size}
            )
            for size, directory in zip(sizes, directories, strict=True)
        ]
        found.update(*run_ranks(world_size, digests, *trees))
        rows += [lasting(read_metrics(directory / "metrics.jsonl")) for directory in directories]
        steps.update((directory / "digests.jsonl").read_bytes() for directory in directories)
        assert all((directory / "summary.json").is_file() for directory in directories)
    assert len(found) == len(steps) == 1
    assert len(rows[0]) == 3 and all(other == rows[0] for other in rows)
    assert rows[0][1]["consistency/gradient_check/passed"]
    one_leaf = {**EVERYTHING, "policy.dtype": dtype, "consistency.gradient_leaves": 1}
    assert digest_of(tiny_run.tree(**one_leaf)) not in found


def test_groups_of_leaves_and_several_updates_have_one_hash_too(run_ranks, tiny_run):
    changes = {
        "rollout.prompts_per_step": 4,
        "consistency.gradient_leaves": [2, 2],
        "algorithm.updates_per_rollout": 2,
        "algorithm.epochs_per_rollout": 2,
    }
    found = set()
    for world_size in (1, 2, 4):
        directory = str(tiny_run.directory / f"run {world_size}")
        tree = tiny_run.tree(**LEAVES | changes | {"run.output_dir": directory})
        found.update(*run_ranks(world_size, digests, tree))
    assert len(found) == 1


LONG = {**LEAVES, "training.steps": 4, "training.save_every": 2}


def test_a_run_is_continued_by_any_number_of_processes(run_ranks, tiny_run, lasting):
    tree = tiny_run.tree(**LONG)
    whole = run_ranks(2, digests, tree)[0]
    directory = tiny_run.directory / "run"
    rows = lasting(read_metrics(directory / "metrics.jsonl"))
    for world_size in (1, 3):
        shutil.rmtree(directory / "checkpoints" / "step_000004")
        assert run_ranks(world_size, resumed, tree) == [whole] * world_size
        assert lasting(read_metrics(directory / "metrics.jsonl")) == rows


def resumed(world, tree):
    return digests(world, tree, resume=True)


def killed_in_step_3(world, tree):
    real, steps = replicated.Replicated.accumulate, []

    def accumulate(self, *given):
        steps.append(given)
        if world.rank == 1 and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *given)

    replicated.Replicated.accumulate = accumulate
    return digests(world, tree)


def test_a_rank_killed_in_a_step_stops_the_others_and_the_run_resumes(run_ranks, tiny_run):
    expected = run_ranks(1, digests, tiny_run.tree(**LONG))[0]
    directory = tiny_run.directory / "killed"
    tree = tiny_run.tree(**LONG, **{"run.output_dir": str(directory)})
    found = run_ranks(3, killed_in_step_3, tree, expects_errors=True)
    assert found[1] is None
    for error in (found[0], found[2]):
        assert type(error) is CollectiveError and "between ranks 0, 1, 2" in str(error)
    assert list_checkpoints(directory / "checkpoints")[-1].name == "step_000002"
    assert run_ranks(2, resumed, tree) == [expected] * 2


# Controls


def under(world, part, name, value, tree):
    setattr(sys.modules[part], name, value)
    return digests(world, tree)


def numbered(tiny_run, world_size, **changes):
    name = f"run {world_size} {len(list(tiny_run.directory.iterdir()))}"
    return tiny_run.tree(**LEAVES | changes | {"run.output_dir": str(tiny_run.directory / name)})


SUMS = (StockSum, StockAllReduce, ContiguousLeaves, OtherRankOrder, LowPrecision)


@pytest.fixture(scope="module")
def right():
    """Holds the digest that mutants must miss, once it is known."""
    return []


@pytest.mark.parametrize("mutant", SUMS, ids=lambda mutant: mutant.__name__)
def test_another_sum_has_other_weights(run_ranks, tiny_run, right, mutant):
    if not right:
        right.append(digest_of(tiny_run.tree(**LEAVES)))
    tree = numbered(tiny_run, 2)
    found = run_ranks(2, under, strategy.__name__, "OrderedSum", mutant, tree)
    assert found[0] != right


class Continued(replicated.Replicated):
    """A rank's fold goes on from leaf to leaf; what it gives is zero until the last."""

    def _giver(self, name):
        give, rounds = super()._giver(name), []

        def later(parameter):
            if self._gives:
                rounds.append(name)
                if len(rounds) % 2:
                    self._buckets.put(name, torch.zeros_like(parameter.grad))
                    return
            give(parameter)

        return later


def test_a_fold_continued_across_leaves_has_other_weights(run_ranks, tiny_run):
    expected = digest_of(tiny_run.tree(**LEAVES))
    tree = numbered(tiny_run, 2)
    strategies = {"replicated": Continued}
    assert run_ranks(2, under, build.__name__, "STRATEGIES", strategies, tree)[0] != [expected]


def test_leaves_tied_to_the_ranks_have_other_weights_on_each_number(run_ranks, tiny_run):
    found = set()
    for world_size in (1, 2, 4):
        tree = numbered(tiny_run, world_size, **{"consistency.gradient_leaves": world_size})
        found.update(run_ranks(world_size, digests, tree)[0])
    assert len(found) == 3


def norm_over_shards(world, parts, numels):
    """Each rank adds the squares of what it has, and the ranks' sums are added."""
    own = sum(float(part.square().sum()) for part in parts.values())
    return sum(world.gather("squares", own)) ** 0.5


def one_scheduler_step_per_process(**given):
    return run_accelerator(**given | {"step_scheduler_with_optimizer": True})


run_accelerator = run.Accelerator


@pytest.mark.parametrize(
    ("part", "name", "mutant", "changes"),
    [
        (strategy, "sharded_gradient_norm", norm_over_shards, {"optimizer.max_grad_norm": 1e-2}),
        (run, "Accelerator", one_scheduler_step_per_process, {"optimizer.schedule": "cosine"}),
    ],
    ids=["norm over shards", "schedule"],
)
def test_weights_depend_on_the_ranks_under(run_ranks, tiny_run, part, name, mutant, changes):
    found = set()
    for world_size in (1, 2, 3):
        tree = numbered(tiny_run, world_size, **changes)
        found.update(run_ranks(world_size, under, part.__name__, name, mutant, tree)[0])
    assert len(found) > 1


def test_a_rank_that_skips_synchronisation_is_named(run_ranks, tiny_run):
    errors = run_ranks(2, skipping, tiny_run.tree(**LEAVES), expects_errors=True)
    for error in errors:
        assert str(error).startswith("after step 1: rank 1 differs from rank 0 in the weights (")


def skipping(world, tree):
    """Rank 1 keeps the gradient of its own last leaf."""
    buckets = replicated.GradientBuckets
    put, gather, own = buckets.put, buckets.gather, {}

    def kept(self, name, gradient):
        own[name] = gradient.clone()
        put(self, name, gradient)

    buckets.put = kept
    given = (lambda self: dict(gather(self)) and own.items()) if world.rank == 1 else gather
    buckets.gather = given
    return digests(world, tree)
