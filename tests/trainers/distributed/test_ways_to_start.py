"""Whole runs as their recipes share them: the stock shadow, no order, ranks that do not come."""

import os
import signal

import pytest

from rl_consistency.distributed.world import CollectiveError
from rl_consistency.trainers import run
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train
from rl_consistency.trainers.strategies import fsdp2
from tests.ranks import telling, wait_for
from tests.trainers.distributed.runs import LEAVES, digests

SHADOWED = LEAVES | {"consistency.shadow_every": 1, "training.steps": 2}


def summaries(world, *trees):
    """Of each run its summary, and what it announced."""
    found = []
    for tree in trees:
        lines = []
        found.append((train(RunConfig.model_validate(tree), announce=lines.append), lines))
    return found


def placed(tiny_run, name, **changes):
    return tiny_run.tree(**changes, **{"run.output_dir": str(tiny_run.directory / name)})


@pytest.mark.thorough
def test_the_stock_path_of_shards_is_that_of_whole_weights(run_ranks, tiny_run):
    alone = placed(tiny_run, "alone", **SHADOWED)
    trees = [
        placed(tiny_run, name, **SHADOWED, **{"training.strategy": name})
        for name in ("replicated", "fsdp2")
    ]
    ((expected, _),) = summaries(None, alone)
    assert expected["stock/mismatched_tokens"] > 0
    for found in run_ranks(2, summaries, *trees):
        for (summary, lines), name in zip(found, ("replicated", "fsdp2"), strict=True):
            for key in expected:
                if key.startswith(("stock/", "consistency/")) or key == "parameter_digest":
                    assert summary[key] == expected[key], key
            assert (summary["strategy"], summary["processes"]) == (name, 2)
            assert summary["gradient_leaves"] == 4 and summary["ordered"] is True
            assert not summary["weights_depend_on_processes"] and lines == []


UNORDERED = {
    **LEAVES,
    "consistency.gradient_leaves": 1,
    "consistency.ordered": False,
    "training.micro_batch_size": 2,
}


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["replicated", "fsdp2"])
def test_without_an_order_rollout_is_training_and_the_weights_depend_on_the_processes(
    run_ranks, tiny_run, strategy
):
    own, found = UNORDERED | {"training.strategy": strategy}, set()
    for world_size in (1, 2, 3):
        tree = placed(tiny_run, str(world_size), **own)
        of_ranks = run_ranks(world_size, summaries, tree)
        for ((summary, _),) in of_ranks:
            assert summary["consistency/mismatched_tokens"] == 0 and summary["ordered"] is False
            assert summary["weights_depend_on_processes"] == (world_size > 1)
            found.add(summary["parameter_digest"])
        told = "not ordered: the weights depend on the number of processes"
        ((_, lines),), *others = of_ranks
        assert lines == ([f"{told}, {world_size}"] if world_size > 1 else [])
        assert all(lines == [] for ((_, lines),) in others)
    assert len(found) == 3


def late_in_step_2(world, tree, over):
    real, steps = run.GRPOTrainer.step, []

    def step(self, number):
        steps.append(number)
        if world.rank == 1 and number == 2:
            wait_for(over)
        return real(self, number)

    run.GRPOTrainer.step = step
    with telling(over):
        return digests(world, tree)


@pytest.mark.thorough
def test_a_rank_that_does_not_come_is_given_up_after_the_timeout(run_ranks, tiny_run, tmp_path):
    tree = tiny_run.tree(**LEAVES, **{"run.collective_timeout": 2})
    waiting, late = run_ranks(2, late_in_step_2, tree, tmp_path / "over", expects_errors=True)
    assert type(waiting) is type(late) is CollectiveError
    assert "rank 0 gave up. Another rank ended, or did not come within 2 s" in str(waiting)


def killed_between_passes(world, tree):
    real, passes = fsdp2.FSDP2.backward, []

    def backward(self, loss):
        passes.append(loss)
        if world.rank == 1 and len(passes) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, loss)

    fsdp2.FSDP2.backward = backward
    return digests(world, tree)


@pytest.mark.thorough
def test_a_rank_killed_inside_a_pass_over_shards_stops_the_others_by_name(run_ranks, tiny_run):
    tree = tiny_run.tree(**LEAVES, **{"training.strategy": "fsdp2"})
    stopped, killed = run_ranks(2, killed_between_passes, tree, expects_errors=True)
    assert killed is None and type(stopped) is CollectiveError
    assert str(stopped).startswith("a gather or a sum of fsdp2 between ranks 0, 1: rank 0 gave up")
