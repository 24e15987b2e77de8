"""Ranks that were given different things say so, by rank and name, before a step is taken."""

import os

import pytest
import torch

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
from tests.trainers.distributed.runs import LEAVES, digests


def given_each(world, *trees):
    return digests(world, trees[world.rank])


def disagreement(run_ranks, *given):
    errors = run_ranks(2, *given, expects_errors=True)
    assert [type(error) for error in errors] == [ConsistencyError] * 2
    assert str(errors[0]) == str(errors[1])
    return str(errors[0])


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        ("training.micro_batch_size", 2, "training.micro_batch_size (2 != 1)"),
        ("training.steps", 3, "training.steps (3 != 2)"),
        ("training.save_every", 1, "training.save_every (1 != 0)"),
        ("run.seed", 4, "run.seed (4 != 3)"),
        ("consistency.gradient_leaves", [2, 2], "consistency.gradient_leaves ([2, 2] != 4)"),
    ],
)
def test_another_recipe_is_named(run_ranks, tiny_run, key, value, difference):
    trees = tiny_run.tree(**LEAVES), tiny_run.tree(**LEAVES | {key: value})
    text = disagreement(run_ranks, given_each, *trees)
    assert text.startswith(f"before anything is read: rank 1 differs from rank 0 in {difference}")
    assert not (tiny_run.directory / "run").exists()


def test_other_data_are_named(run_ranks, tiny_run):
    paths = [tiny_run.example_file(count, f"{count}.jsonl") for count in (20, 21)]
    fields = {"prompt_field": "question", "answer_field": "answer"}
    trees = [
        tiny_run.tree(**LEAVES | {"data": {"path": str(p), "max_prompt_tokens": 6} | fields})
        for p in paths
    ]
    text = disagreement(run_ranks, given_each, *trees)
    assert text.startswith("before the first step: rank 1 differs from rank 0 in training data (")
    assert not (tiny_run.directory / "run").exists()


def with_other_weights(world, tree):
    real = run.load_policy

    def load_policy(*given, **named):
        model, tokenizer = real(*given, **named)
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += world.rank
        return model, tokenizer

    run.load_policy = load_policy
    return digests(world, tree)


def with_other_threads(world, tree):
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate chooses
    torch.set_num_threads(1 + world.rank)
    return digests(world, tree)


@pytest.mark.parametrize(
    ("how", "difference"),
    [(with_other_weights, "policy's weights ("), (with_other_threads, "num_threads (2 != 1)")],
)
def test_other_weights_and_another_fingerprint_are_named(run_ranks, tiny_run, how, difference):
    tree = tiny_run.tree(**LEAVES | {"run.num_threads": None})
    text = disagreement(run_ranks, how, tree)
    assert text.startswith(f"before the first step: rank 1 differs from rank 0 in {difference}")
    assert not (tiny_run.directory / "run").exists()


def test_a_run_is_not_continued_with_another_number_of_leaves(tiny_run):
    tiny_run(**LEAVES)
    with pytest.raises(CheckpointError, match=r"consistency\.gradient_leaves: 2 != 4"):
        tiny_run(**LEAVES | {"consistency.gradient_leaves": 2}, resume=True)


def test_stock_ops_around_a_run_with_leaves_are_refused(tiny_run):
    with strict(False), pytest.raises(ValueError, match="gradient_leaves needs canonical ops"):
        tiny_run(**LEAVES)
    assert not (tiny_run.directory / "run").exists()


def test_an_error_of_one_rank_ends_all(run_ranks, tiny_run):
    """Rewards are computed by rank 0 only."""
    reward = {"reward.functions": [{"name": "toy_rewards:raising"}]}
    first, second = run_ranks(2, digests, tiny_run.tree(**LEAVES | reward), expects_errors=True)
    assert "no judge at home" in str(first)
    assert str(second) == f"rank 0: {first}"


def drifting(world, tree):
    real = run.GRPOTrainer._forward

    def forward(self, model, experience, group):
        scored = real(self, model, experience, group)
        if world.rank == 1:
            scored.logprobs.data += 1e-6
        return scored

    run.GRPOTrainer._forward = forward
    return digests(world, tree)


def test_drift_in_training_on_one_rank_is_seen_by_all_and_saved_once(run_ranks, tiny_run):
    for error in run_ranks(2, drifting, tiny_run.tree(**LEAVES), expects_errors=True):
        assert type(error) is ConsistencyError
        assert str(error).startswith("step 1: ") and "other logprobs in training" in str(error)
    assert len(list((tiny_run.directory / "run" / "replay").iterdir())) == 1
