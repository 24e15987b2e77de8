"""The digests of each step are the same under every strategy, on any number of processes."""

from rl_consistency.cli.main import main
from tests.trainers.distributed.runs import LEAVES, digests


def test_a_step_has_the_same_digests_under_another_strategy(run_ranks, tiny_run, capsys):
    directories = []
    for world_size, name in ((1, "replicated"), (2, "fsdp2")):
        directories.append(tiny_run.directory / name)
        place = {"run.output_dir": str(directories[-1]), "training.strategy": name}
        run_ranks(
            world_size, digests, tiny_run.tree(**LEAVES | {"policy.dtype": "bfloat16"} | place)
        )
    assert main(["diff", *map(str, directories)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        'recipe  training.strategy: "replicated" != "fsdp2"',
        "equal in all 2 common steps, 1 to 2",
    ]
    one, other = ((directory / "digests.jsonl").read_bytes() for directory in directories)
    assert one == other
