"""Algorithms and optimizers on one process and on two: one set of weights for each micro-batch."""

import pytest

from tests.trainers.distributed.runs import LEAVES, digest_of, digests

REWARD = "\ndef rare(completions, **_): return [float(len(t) % 4 == 0) for t in completions]\n"
DYNAMIC = {
    "algorithm.name": "gspo",
    "algorithm.dynamic_sampling": {"max_rounds": 3},
    "algorithm.epochs_per_rollout": 2,
    "optimizer.name": "muon",
    "reward.functions": [{"name": "toy_rewards:rare"}],
}
KL = {
    "algorithm.name": "reinforce_plus_plus",
    "algorithm.kl_coefficient": 0.05,
    "algorithm.epochs_per_rollout": 2,
    "optimizer.schedule": "linear",
    "optimizer.min_lr_ratio": 0.5,
}
CISPO = {
    "algorithm.name": "cispo",
    "algorithm.clip_high": 0.01,
    "algorithm.epochs_per_rollout": 2,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [DYNAMIC, KL, CISPO],
    ids=["gspo, muon, dynamic sampling", "reinforce++", "cispo"],
)
def test_two_processes_end_with_the_weights_of_one(run_ranks, tiny_run, changes):
    with (tiny_run.directory / "toy_rewards.py").open("a") as file:
        file.write(REWARD)

    def tree(name, **more):
        return tiny_run.tree(
            **LEAVES | changes | {"run.output_dir": str(tiny_run.directory / name)} | more
        )

    alone = digest_of(tree("alone", **{"training.micro_batch_size": 2}))
    assert run_ranks(2, digests, tree("two")) == [[alone], [alone]]
    rows = [(tiny_run.directory / name / "digests.jsonl").read_bytes() for name in ("alone", "two")]
    assert rows[0] == rows[1]
