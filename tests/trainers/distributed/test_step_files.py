"""The digests of each step are the same under every strategy, on any number of processes."""

import signal

from rl_consistency.trainers import run
from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints
from tests.trainers.distributed.runs import LEAVES, digests


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
