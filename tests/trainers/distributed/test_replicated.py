"""Runs on several processes: groups of leaves, runs that are continued, ranks that fail.

That the weights do not depend on the number of processes is judged by `verify --world`, which
tests/cli/test_verify_world.py runs; tests/verify/test_world.py has the negative controls.
"""

import os
import shutil
import signal

import pytest

from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import CollectiveError
from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory.step_files import read_metrics
from rl_consistency.trainers.strategies import strategy
from rl_consistency.verify.mutants.sums import RankApart
from rl_consistency.verify.substitution import substituted
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


MICRO_BATCHES = {1: (2,), 2: (2,), 3: (1,)}
"""Number of processes -> sizes."""


@pytest.mark.thorough
def test_one_set_of_digests_and_metrics_for_any_number_of_processes(run_ranks, tiny_run, lasting):
    dtype = "bfloat16"
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
    digest_of(tiny_run.tree(**one_leaf))  # bf16 weights may round the difference away
    assert (tiny_run.directory / "run" / "digests.jsonl").read_bytes() not in steps


@pytest.mark.thorough
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


@pytest.mark.thorough
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
    real, steps = strategy.Replicated.accumulate, []

    def accumulate(self, *given):
        steps.append(given)
        if world.rank == 1 and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *given)

    strategy.Replicated.accumulate = accumulate
    return digests(world, tree)


@pytest.mark.thorough
def test_a_rank_killed_in_a_step_stops_the_others_and_the_run_resumes(run_ranks, tiny_run):
    expected = run_ranks(1, digests, tiny_run.tree(**LONG))[0]
    directory = tiny_run.directory / "killed"
    tree = tiny_run.tree(**LONG, **{"run.output_dir": str(directory)})
    found = run_ranks(3, killed_in_step_3, tree, expects_errors=True)
    assert found[1] is None
    for error in (found[0], found[2]):
        assert type(error) is CollectiveError and "between ranks 0, 1, 2" in str(error)
    assert tiny_run.checkpoints("killed")[-1] == "step_000002"
    assert run_ranks(2, resumed, tree) == [expected] * 2


def with_a_rank_apart(world, tree):
    with substituted(OrderedSum, RankApart):
        return digests(world, tree)


def test_a_rank_that_skips_synchronisation_is_named(run_ranks, tiny_run):
    tree = tiny_run.tree(**LEAVES)
    for error in run_ranks(2, with_a_rank_apart, tree, expects_errors=True):
        assert str(error).startswith("after step 1: rank 1 differs from rank 0 in the weights (")


def test_shards_of_a_run_with_one_leaf_pass_its_gradient_check(run_ranks, tiny_run):
    changes = {"training.strategy": "fsdp2", "consistency.gradient_check_every": 1}
    one_leaf = {"consistency.gradient_leaves": 1, "training.steps": 1}
    run_ranks(1, digests, tiny_run.tree(**LEAVES | changes | one_leaf))
    (row,) = read_metrics(tiny_run.directory / "run" / "metrics.jsonl")
    assert row["consistency/gradient_check/passed"]


def interrupted(world, tree):
    """What a rank raises where rank 1 alone gets a signal in the first step."""
    step = run._Run.step

    def signalled(self, number):
        if world.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return step(self, number)

    run._Run.step = signalled
    try:
        digests(world, tree)
    except KeyboardInterrupt:
        return "interrupted"


def test_a_signal_to_one_rank_ends_all_after_a_checkpoint(run_ranks, tiny_run):
    assert run_ranks(2, interrupted, tiny_run.tree(**LEAVES)) == ["interrupted"] * 2
    assert tiny_run.checkpoints() == ["step_000001"]
