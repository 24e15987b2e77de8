"""Runs the cells of the hash table: one group of processes for all cells of one number of them."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
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
from rl_consistency.verify.processes import end_with_parent, start_method
from rl_consistency.verify.world.cells import RELEASED, Cell, Outcome, config_of

Cells = Mapping[int, Cell]
"""Place among all cells -> cell."""


def run_cells(
    cells: Sequence[Cell],
    *,
    steps: int,
    device: str = "cpu",
    on_outcome: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run all cells, in the order of their numbers of processes; returns the outcomes by cell.

    A cell whose process raises or dies has its error as the outcome, and the others run on in new
    processes. `on_outcome` is called with each outcome as soon as it is there.
    """
    found: dict[int, Outcome] = {}

    def add(i: int, **fields: Any) -> None:
        found[i] = Outcome(cell=cells[i], **fields)
        on_outcome(found[i])

    for world_size in sorted({cell.world_size for cell in cells}):
        left = {i: cell for i, cell in enumerate(cells) if cell.world_size == world_size}
        while left:
            with TemporaryDirectory() as folder:
                _run_group(left, world_size, steps, device, Path(folder), add)
            left = {i: cell for i, cell in left.items() if i not in found}
    return [found[i] for i in range(len(cells))]


def _run_group(
    cells: Cells, world_size: int, steps: int, device: str, folder: Path, add: Callable[..., None]
) -> None:
    """Run cells of one number of processes up to the end, or to the first that fails."""
    left = list(cells)

    def collect() -> None:
        while left and (file := folder / f"{left[0]}.json").exists():
            add(left.pop(0), **json.loads(file.read_text()))

    given = cells, world_size, steps, device, folder
    method = start_method(device, __name__).get_start_method()
    context = start_processes(_enter, given, world_size, False, True, method)
    assert context is not None
    processes: list[Any] = context.processes
    try:
        while not context.join(timeout=0.1):
            collect()
        collect()
    except (ProcessRaisedException, ProcessExitedException) as error:
        collect()
        if left:  # a process may end badly after its last cell
            add(left[0], error=str(error))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _enter(rank: int, cells: Cells, world_size: int, steps: int, device: str, folder: Path) -> None:
    end_with_parent()
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
    digest, critic = summary["parameter_digest"], summary.get("critic_digest")
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}
        for row in read_metrics(directory / "metrics.jsonl")
    ]
    return {
        "digest": sha256(f"{digest} {critic}".encode()).hexdigest() if critic else digest,
        "tokens": summary["consistency/tokens"],
        "mismatched_tokens": summary["consistency/mismatched_tokens"],
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }
