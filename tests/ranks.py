"""Real processes as torchrun starts them: a function runs on several ranks, over gloo."""

import os
import pickle
import time
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from rl_consistency.distributed.world import CollectiveError, World
from rl_consistency.numerics.errors import ConsistencyError

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which would be the GPU of another machine

PATIENCE = 120
"""Seconds until ranks that do not end fail the test."""


def _enter(rank, world_size, folder, timeout, ranks_per_node, function, arguments):
    torch.set_num_threads(1)
    for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ |= {name: str(number), f"LOCAL_{name}": str(number)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    timeout = timedelta(seconds=timeout)
    try:
        world = World.join(torch.device("cpu"), timeout, ranks_per_node)
        found = function(world, *arguments)
    except (ConsistencyError, CollectiveError, ValueError) as error:
        found = error
    (folder / f"part {rank}").write_bytes(pickle.dumps(found))
    (folder / f"part {rank}").rename(folder / f"rank {rank}")
    # The others do not wait for a rank with an error.
    if not isinstance(found, Exception):
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def telling(over):
    """A rank whose collective fails inside the block makes the file `over`."""
    try:
        yield
    except CollectiveError:
        over.touch()
        raise


def wait_for(over):
    """Come as late as it takes the other ranks to give up, and at last if they do not."""
    end = time.monotonic() + 60
    while not over.exists() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.fixture
def run_ranks(tmp_path_factory):
    """`run_ranks(W, function, *arguments)` -> what `function(world, *arguments)` returned on each
    rank. If the test `expects_errors`, that may be the error raised, or None for a killed rank."""

    def run(
        world_size,
        function,
        *arguments,
        timeout=30,
        ranks_per_node=None,
        expects_errors=False,
    ):
        folder = tmp_path_factory.mktemp("ranks")
        given = (world_size, folder, timeout, ranks_per_node, function, arguments)
        # Forked from a process that has imported torch: that is most of a rank's start.
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preloaded"])
        ranks = [context.Process(target=_enter, args=(r, *given)) for r in range(world_size)]
        end = time.monotonic() + PATIENCE
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(max(0, end - time.monotonic()))
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        assert not late, f"ranks {late} did not end within {PATIENCE} s"
        files = [folder / f"rank {rank}" for rank in range(world_size)]
        found = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
        if not expects_errors:
            for process, result in zip(ranks, found, strict=True):
                assert process.exitcode == 0 and not isinstance(result, Exception), repr(result)
        return found

    return run
