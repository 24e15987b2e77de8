"""A mixture of experts ends with one hash under every strategy and number of processes."""

from rl_consistency.trainers.run_directory.step_files import read_metrics
from tests.trainers.distributed.runs import LEAVES, digest_of
from tests.trainers.distributed.test_zero import released

SPARSE = {
    **LEAVES,
    "policy.build.architecture": "qwen3_moe",
    "policy.build.experts": {"count": 6, "per_token": 2},
    "policy.dtype": "bfloat16",
    "algorithm.balance_coefficient": 0.05,
    "optimizer.weight_decay": 0.2,
    "algorithm.loss": "dapo",
    "algorithm.overlong": "mask",
    "rollout.sampling": {"n": 3, "max_tokens": 5, "stop_token_ids": [*range(50)]},
    "consistency.gradient_check_every": 2,
}
STRATEGIES = ("replicated", "fsdp2", "zero2", "zero3")


def test_every_strategy_has_the_hash_of_one_process(run_ranks, tiny_run, lasting):
    def tree(name):
        directory = tiny_run.directory / name
        return tiny_run.tree(
            **SPARSE, **{"training.strategy": name.split()[0], "run.output_dir": str(directory)}
        )

    expected = digest_of(tree("replicated alone"))
    found = run_ranks(2, released, *map(tree, STRATEGIES))
    assert found == [[expected] * len(STRATEGIES)] * 2
    rows = [
        lasting(read_metrics(tiny_run.directory / name / "metrics.jsonl"))
        for name in ("replicated alone", *STRATEGIES)
    ]
    assert all(row["consistency/rerouted_tokens"] == 0 for row in rows[0])
    assert all(other == rows[0] for other in rows)
    assert all(0 < row["completion/cut_fraction"] < 1 for row in rows[0])
