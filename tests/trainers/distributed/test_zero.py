"""DeepSpeed's ZeRO ends with the weights of every other strategy, on any number of processes."""

import pytest

from rl_consistency.trainers.strategies import zero
from tests.trainers.distributed.runs import digest_of, digests
from tests.trainers.distributed.test_replicated import EVERYTHING

RELEASED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
STAGES = {"float32": (1, 2, 3), "bfloat16": (2, 3)}


def released(world, *trees):
    """`digests`, where ZeRO-3 frees each weight at once, however small."""
    zero.ZERO_OPTIMIZATION |= RELEASED
    return digests(world, *trees)


@pytest.mark.parametrize("dtype", STAGES)
def test_all_stages_have_the_hash_of_replicated_weights(run_ranks, tiny_run, dtype):
    def tree(strategy, world_size=1):
        directory = str(tiny_run.directory / f"{strategy} {world_size}")
        own = {"policy.dtype": dtype, "training.strategy": strategy, "run.output_dir": directory}
        return tiny_run.tree(**EVERYTHING | own)

    found = {digest_of(tree("replicated"))}
    for world_size in (1, 2, 3):
        trees = [tree(f"zero{stage}", world_size) for stage in STAGES[dtype]]
        for digests_of_a_rank in run_ranks(world_size, released, *trees):
            found.update(digests_of_a_rank)
    assert len(found) == 1
