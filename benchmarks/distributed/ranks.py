"""Runs a function in processes of one GPU each, over NCCL; on a CPU, over gloo."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.timing import Machine
from rl_consistency.distributed.world import World


def on_ranks(bench: Machine, world_size: int, function: Callable[..., Any], *given: Any) -> Any:
    """What `function(world, *given)` returns on rank 0; ValueError without so many GPUs."""
    kind, found = bench.device.type, torch.cuda.device_count()
    if kind == "cuda" and found < world_size:
        raise ValueError(f"this takes {world_size} GPUs; here are {found}.")
    with TemporaryDirectory() as place:
        spawn(_enter, (world_size, kind, Path(place), function, given), nprocs=world_size)
        return pickle.loads((Path(place) / "found").read_bytes())


def _enter(
    rank: int, world_size: int, kind: str, place: Path, function: Any, given: tuple[Any, ...]
) -> None:
    for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ |= {name: str(number), f"LOCAL_{name}": str(number)}
    device = torch.device(kind)
    bound: dict[str, Any] = {}
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        bound = {"device_id": device}
    dist.init_process_group(
        "nccl" if bound else "gloo",
        init_method=f"file://{place}/store",
        rank=rank,
        world_size=world_size,
        **bound,
    )
    found = function(World.join(device), *given)
    if rank == 0:
        (place / "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
