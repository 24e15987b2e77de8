"""Runs the cells of the hash table: one group of processes for all cells of one number of them."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from rl_consistency.numerics.files import write_whole
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory.step_files import read_metrics
from rl_consistency.trainers.strategies import zero
from rl_consistency.verify.mutants.world import WORLD_MUTANTS
from rl_consistency.verify.processes import end_with_parent
from rl_consistency.verify.world.cells import RELEASED, Cell, Outcome, config_of

OnOutcome = Callable[[Outcome], None]
Cells = Mapping[int, Cell]
"""Place among all cells -> cell."""


def run_cells(
    cells: Sequence[Cell], *, steps: int, device: str = "cpu", on_outcome: OnOutcome
) -> list[Outcome]:
    """Run all cells, in the order of their numbers of processes; returns the outcomes by cell.

    A cell whose process raises or dies has its error as the outcome, and the others run on in new
    processes. `on_outcome` is called with each outcome as soon as it is there.
    """
    found: dict[int, Outcome] = {}
    for world_size in sorted({cell.world_size for cell in cells}):
        left = {i: cell for i, cell in enumerate(cells) if cell.world_size == world_size}
        while left:
            with TemporaryDirectory() as folder:
                _run_group(left, found, steps, device, Path(folder), on_outcome)
            left = {i: cell for i, cell in left.items() if i not in found}
    return [found[i] for i in range(len(cells))]


def _run_group(
    cells: Cells,
    found: dict[int, Outcome],
    steps: int,
    device: str,
    folder: Path,
    on_outcome: OnOutcome,
) -> None:
    """Run cells of one number of processes up to the end, or to the first that fails."""

    def collect() -> None:
        for i, cell in cells.items():
            file = folder / f"{i}.json"
            if i not in found and file.exists():
                found[i] = Outcome(cell=cell, **json.loads(file.read_text()))
                on_outcome(found[i])

    # Forked from a process that has imported torch, which is most of a start; CUDA bars that.
    method = "spawn" if device == "cuda" else "forkserver"
    get_context("forkserver").set_forkserver_preload([__name__])
    world_size = next(iter(cells.values())).world_size
    given = cells, world_size, steps, device, folder
    context = start_processes(_enter, given, world_size, False, True, method)
    assert context is not None
    processes: list[Any] = context.processes
    try:
        while not context.join(timeout=0.1):
            collect()
        collect()
    except (ProcessRaisedException, ProcessExitedException) as error:
        collect()
        # A process may end badly after its last cell.
        i = next((i for i in cells if i not in found), None)
        if i is None:
            return
        found[i] = Outcome(cell=cells[i], error=str(error))
        on_outcome(found[i])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _enter(rank: int, cells: Cells, world_size: int, steps: int, device: str, folder: Path) -> None:
    Thread(target=end_with_parent, daemon=True).start()
    # torch's own FSDP2 calls what torch 2.13 deprecates; the lines would stand across the table.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ |= {name: str(number), f"LOCAL_{name}": str(number)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    mutants = {mutant.name: mutant for mutant in WORLD_MUTANTS}
    zero.ZERO_OPTIMIZATION |= RELEASED
    # Once: DeepSpeed keeps hold of the first process group it sees.
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
    )
    for i, cell in cells.items():
        with mutants[cell.mutant].perturb() if cell.mutant else nullcontext():
            found = _outcome(cell, steps, device, folder / str(i))
        dist.barrier()
        if rank == 0:
            write_whole(folder / f"{i}.json", json.dumps(found))
    dist.destroy_process_group()


def _outcome(cell: Cell, steps: int, device: str, directory: Path) -> dict[str, Any]:
    """The fields of an `Outcome`, as JSON has them."""
    start = time.perf_counter()
    summary = train(config_of(cell, steps, device, directory), announce=lambda line: None)
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}
        for row in read_metrics(directory / "metrics.jsonl")
    ]
    return {
        "digest": _joined(summary["parameter_digest"], summary.get("critic_digest")),
        "tokens": summary["consistency/tokens"],
        "mismatched_tokens": summary["consistency/mismatched_tokens"],
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }


def _joined(policy: str, critic: str | None) -> str:
    """One digest of the digests that a run ended with."""
    return policy if critic is None else sha256(f"{policy} {critic}".encode()).hexdigest()
