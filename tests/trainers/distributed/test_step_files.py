"""The digests of each step are the same under every strategy, on any number of processes."""

import signal

from rl_consistency.cli.main import main
from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints
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
    (saved,) = list_checkpoints(tiny_run.directory / "run" / "checkpoints")
    assert saved.name == "step_000001"
