"""DeepSpeed's ZeRO ends with the weights of every other strategy; each control has others."""

import os

import pytest
import torch
import torch.distributed as dist

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.models import inventory
from rl_consistency.models import patch as patch_module
from rl_consistency.models.sharding import is_shard
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.trainers import launch
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.policy import load_policy
from rl_consistency.trainers.run_directory.step_files import read_metrics
from rl_consistency.trainers.strategies import strategy, zero
from rl_consistency.verify.mutants.sums import LowPrecision
from rl_consistency.verify.world import RELEASED
from tests.trainers.distributed.runs import LEAVES, digest_of, digests
from tests.trainers.distributed.test_replicated import EVERYTHING, resumed

STAGES = {"float32": ("zero1", "zero2", "zero3"), "bfloat16": ("zero2", "zero3")}
WORLDS = {"zero1": (2,), "zero2": (2,), "zero3": (3,)}
"""Numbers of processes; `verify --world` has all of them."""


def released(world, *trees):
    """`digests`, where ZeRO-3 frees each weight at once, however small."""
    zero.ZERO_OPTIMIZATION |= RELEASED
    return digests(world, *trees)


@pytest.mark.thorough
def test_all_stages_have_the_hash_and_the_metrics_of_replicated(run_ranks, tiny_run, lasting):
    def tree(directory, dtype, name):
        own = {"training.strategy": name, "policy.dtype": dtype, "run.output_dir": str(directory)}
        return tiny_run.tree(**EVERYTHING | own | {"optimizer.weight_decay": 0.2})

    def row(directory):
        return lasting(read_metrics(directory / "metrics.jsonl"))

    right = {dtype: tiny_run.directory / dtype for dtype in STAGES}
    expected = {dtype: digest_of(tree(right[dtype], dtype, "replicated")) for dtype in STAGES}
    for world_size in (2, 3):
        runs = {
            tiny_run.directory / f"{dtype} {name} {world_size}": (dtype, name)
            for dtype, names in STAGES.items()
            for name in names
            if world_size in WORLDS[name]
        }
        found = run_ranks(world_size, released, *(tree(d, *run) for d, run in runs.items()))
        assert found == [[expected[dtype] for dtype, _ in runs.values()]] * world_size
        assert all(row(d) == row(right[dtype]) for d, (dtype, _) in runs.items())


@pytest.mark.thorough
def test_a_run_is_continued_by_other_strategies(run_ranks, tiny_run, lasting):
    """With DeepSpeed's own settings, by which ZeRO-3 keeps small weights whole."""

    def tree(name, steps, directory="run"):
        own = {"training.strategy": name, "training.steps": steps, "policy.dtype": "bfloat16"}
        return tiny_run.tree(
            **LEAVES | own | {"run.output_dir": str(tiny_run.directory / directory)}
        )

    expected = digest_of(tree("replicated", 4, "whole"))
    run_ranks(2, digests, tree("zero3", 1))
    run_ranks(1, resumed, tree("replicated", 2))
    run_ranks(3, resumed, tree("zero3", 3))
    assert run_ranks(2, resumed, tree("zero2", 4)) == [[expected]] * 2
    rows = [
        lasting(read_metrics(tiny_run.directory / d / "metrics.jsonl")) for d in ("run", "whole")
    ]
    assert rows[0] == rows[1]


def controlled(world, low_precision, *stock):
    real, strategy.OrderedSum = strategy.OrderedSum, LowPrecision
    found = digest_of(low_precision)
    strategy.OrderedSum = real
    zero.ZERO_OPTIMIZATION["reduce_bucket_size"] = 1000
    return found, released(world, *stock)


@pytest.mark.thorough
def test_another_sum_has_other_weights(run_ranks, tiny_run):
    """DeepSpeed's own sum over two ranks has the order of two leaves, where four were asked for."""

    def tree(name, directory, **changes):
        own = {"training.strategy": name, "run.output_dir": str(tiny_run.directory / directory)}
        return tiny_run.tree(**LEAVES | own | changes)

    two = digest_of(tree("replicated", "two", **{"consistency.gradient_leaves": 2}))
    four = digest_of(tree("replicated", "four"))
    unordered = {
        "consistency.ordered": False,
        "consistency.gradient_leaves": 1,
        "consistency.gradient_check_every": 0,
    }
    stock = [tree(n, n, **unordered) for n in STAGES["float32"]]
    for low_precision, own_sums in run_ranks(2, controlled, tree("zero2", "bf16"), *stock):
        assert low_precision != four
        assert set(own_sums) == {two} != {four}


def parts(world, tree):
    """What each stage makes of one policy."""
    zero.ZERO_OPTIMIZATION |= RELEASED
    config, found = RunConfig.model_validate(tree), []
    for stage in (1, 2, 3):
        policy, _ = load_policy(config.policy, config.tokenizer, seed=3)
        with torch.no_grad():
            policy.get_parameter("model.embed_tokens.weight")[7] = -0.0
        before = parameter_digest(policy)
        with patch_module.patch(policy, grad_dtype=torch.float32):
            ranks = zero.Zero(world, PartOrder(4), policy, stage=stage)
            masters = ranks.masters()
            whole = parameter_digest(dict(ranks.whole(ranks.pieces(masters))))
            kept = sum(map(len, masters.values())) / sum(ranks.numels.values())
            sharded = [all(map(is_shard, policy.parameters()))]
            with whole_weights(policy):
                whole_policy = parameter_digest(policy)
            sharded.append(all(map(is_shard, policy.parameters())))
            ranks.close()
        found.append((round(kept, 2), sharded, {before, whole, whole_policy} == {before}))
    import deepspeed.comm

    return found, deepspeed.comm.comm.cdb.shm_comm_op


def test_a_rank_keeps_its_part_and_any_bit_of_the_whole_comes_back(run_ranks, tiny_run):
    """The sign of a zero too. No op is compiled for it."""
    right = [(0.33, [keeps] * 2, True) for keeps in (False, False, True)]
    for found, compiled in run_ranks(3, parts, tiny_run.tree()):
        assert found == right and compiled is None


def alone(world, tree):
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    looks = []
    patch_module.faults = lambda *given, **named: (
        looks.append(1) or inventory.faults(*given, **named)
    )
    return digest_of(tree), len(looks)


@pytest.mark.thorough
def test_one_process_needs_no_launcher_and_looks_at_the_model_a_few_times(run_ranks, tiny_run):
    one = {**LEAVES, "consistency.gradient_leaves": 1}
    other = {"training.strategy": "zero3", "run.output_dir": str(tiny_run.directory / "other")}
    ((found, looks),) = run_ranks(1, alone, tiny_run.tree(**one | other))
    assert found == digest_of(tiny_run.tree(**one))
    assert looks < 10, looks


def test_a_run_without_deepspeed_says_how_to_install_it(tiny_run, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rl-consistency\[deepspeed\]'") as error:
        tiny_run(**{"training.strategy": "zero2"})
    assert "\n" not in str(error.value) and not (tiny_run.directory / "run").exists()
