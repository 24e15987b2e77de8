"""Whole runs on several ranks, cut so that leaves differ in size and split groups of samples."""

from __future__ import annotations

from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train

LEAVES = {
    "rollout.prompts_per_step": 3,
    "rollout.sampling": {"n": 3, "max_tokens": 9},
    "consistency.gradient_leaves": 4,
    "training.micro_batch_size": 1,
    "training.steps": 2,
}


def digests(world, *trees, resume=False):
    """The digest of the weights that each run ends with."""
    return [digest_of(tree, resume) for tree in trees]


def digest_of(tree, resume=False):
    config = RunConfig.model_validate(tree)
    summary = train(config, resume=resume, announce=lambda line: None)
    assert summary["consistency/mismatched_tokens"] == 0
    return summary["parameter_digest"]
