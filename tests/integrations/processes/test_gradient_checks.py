"""Gradient checks of an attached trainer in two processes, which DDP or DeepSpeed's ZeRO joins."""

import os
from contextlib import nullcontext
from functools import partial

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch

import rl_consistency
from rl_consistency.integrations import gradient_checks
from rl_consistency.models import sharding, whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.digest import parameter_digest
from tests.integrations.trainers import distinct_tokens, grpo, loaded, logged

KEY = "consistency/gradient_check"
CHECKED = {"check_gradients_every": 1}


def equal_rewards(completions, **columns):
    return [1.0] * len(completions)


def asked_for(stage):
    """DeepSpeed, as `accelerate launch` asks for it."""
    os.environ |= {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {"use_cpu": False}  # with which accelerate leaves DeepSpeed out


def trained(build, reward, checks, **options):
    """What a run ended with, and what it logged of its checks."""
    trainer = build(gradient_accumulation_steps=2, ddp_backend="gloo", **options)
    trainer.reward_funcs = [reward]
    if (plugin := trainer.accelerator.state.deepspeed_plugin) is not None:
        always = {"stage3_param_persistence_threshold": 0}  # shards of small weights too
        plugin.deepspeed_config["zero_optimization"] |= always
    with rl_consistency.attach(trainer, **checks) as attachment:
        trainer.train()
    sharded = any(map(sharding.is_shard, trainer.model.parameters()))
    with whole_weights.whole_weights(trainer.model) as policy:
        digest = parameter_digest(policy)
    names = ("checks", "without_gradient", "regroupings", "mismatched_elements")
    figures = {name: logged(trainer, f"{KEY}/{name}") for name in names}
    drift = attachment.drift.mismatched_tokens
    own = attachment.gradients is not None and attachment.gradients.passed
    return digest, (type(trainer.model_wrapped).__name__, sharded, drift, own, figures)


def stock_linear(check, *args, **options):
    with strict(except_={"linear"}):
        return check(*args, **options)


def in_all_ways(world, directory, folder):
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # else a first run compiles for a minute
    models = [loaded(directory, dtype=torch.bfloat16) for _ in range(8)]  # whole, before ZeRO-3
    found = []

    def run(reward, checks, **options):
        return trained(
            partial(grpo, directory, folder, model=models.pop()), reward, checks, **options
        )

    def both(reward, **options):
        without, checked = (run(reward, checks, **options) for checks in ({}, CHECKED))
        found.append((without[0] == checked[0], *checked[1]))

    both(distinct_tokens)
    check = gradient_checks.check_gradients
    if world.rank == 1:
        gradient_checks.check_gradients = partial(stock_linear, check)
    with pytest.raises(ConsistencyError) as error:
        run(distinct_tokens, CHECKED)
    gradient_checks.check_gradients = check
    found.append(str(error.value))
    both(distinct_tokens, **asked_for(2))
    both(distinct_tokens if world.rank == 0 else equal_rewards, **asked_for(3))
    whole_weights._no_library_hooks = nullcontext
    with pytest.raises(AssertionError, match="has already been reduced"):
        run(distinct_tokens, CHECKED, **asked_for(2))
    return found


@pytest.mark.thorough
def test_checks_pass_and_leave_the_weights_alone_under_ddp_and_zero(run_ranks, directory, tmp_path):
    """Controls: a fault of one rank stops both, and hooks of DeepSpeed that stay on are seen."""
    for rank, found in enumerate(run_ranks(2, in_all_ways, directory, tmp_path)):
        replicated, error, zero2, zero3 = found
        figures = {
            "checks": [2, 2],
            "without_gradient": [0, 0],
            "regroupings": [2, 2],
            "mismatched_elements": [0, 0],
        }
        assert replicated == (True, "DistributedDataParallel", False, 0, True, figures)
        assert "step 1, process 1: gradients depend on how the batch was cut" in error
        assert "first in model." in error
        assert zero2 == (True, "DeepSpeedEngine", False, 0, True, figures)
        figures |= {"checks": [1, 1], "without_gradient": [1, 1], "regroupings": [1, 1]}
        assert zero3 == (True, "DeepSpeedEngine", True, 0, rank == 0, figures)
