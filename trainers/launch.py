"""What started this process, and whether a run can honour what the launcher was asked for.

Precision, micro-batches and device of a run stand in its recipe. `accelerate launch`, `torchrun`
and `mpirun` hand their settings on as environment variables. One that a run would have to ignore is
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs

from rl_consistency.distributed.leaves import LeafOrder
from rl_consistency.distributed.world import CollectiveError, World
from rl_consistency.trainers.config.recipe import RunConfig, leaf_problems, strategy_problems
from rl_consistency.trainers.strategies.launcher_settings import is_on, strategy_of, unfollowed

_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_PARALLEL = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
_ONE = "--num_processes 1 --num_machines 1"


def is_first_process() -> bool:
    """Whether this is the process that writes files and speaks."""
    return _world_size() == 1 or os.environ.get("RANK", "").strip() in ("", "0")


def check_launch(config: RunConfig) -> None:
    """ValueError, with every setting and its remedy, where the launcher asks for what is not done,
    or a number of processes cannot share the work."""
    _refuse_mpi()
    size = _world_size()
    _refuse_unshared(config, size)
    if size > 1 and not _has_local_rank():
        raise ValueError(
            f"WORLD_SIZE={size} without LOCAL_RANK: unset it, or start the processes with "
            "accelerate launch or torchrun"
        )
    _refuse_missing_processes(
        "on a CPU set ACCELERATE_USE_CPU=true and give it --multi_gpu --num_processes N, or use "
        f"torchrun; for one process give it {_ONE}"
    )
    strategy = strategy_of(config.training.strategy)
    problems = [
        *_unhonoured(config.run.device),
        *unfollowed(config.policy.dtype),
        *strategy_problems(config, strategy),
    ]
    if problems:
        raise ValueError("; ".join(problems))


def check_machine(config: RunConfig) -> RunConfig:
    """The recipe with the strategy that holds here.

    ValueError where this process cannot do what the recipe says, before anything is computed.
    """
    check_launch(config)
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "run.device is cuda but torch sees no GPU here; set it to cpu, or install a CUDA build"
        )
    strategy = {"strategy": strategy_of(config.training.strategy)}
    return config.model_copy(update={"training": config.training.model_copy(update=strategy)})


def join(config: RunConfig) -> tuple[Accelerator, World]:
    """This process among those of the run; a group of processes is made where there is none yet."""
    timeout = timedelta(seconds=config.run.collective_timeout)
    # With the optimizer, accelerate would step a schedule once for each process.
    try:
        accelerator = Accelerator(
            cpu=config.run.device == "cpu",
            mixed_precision="no",
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    except dist.DistError as error:
        raise CollectiveError(
            f"not all processes of this run came within run.collective_timeout="
            f"{config.run.collective_timeout} seconds ({str(error).splitlines()[0]}). Look at the "
            "output of the others."
        ) from error
    if config.training.strategy != "replicated" and not dist.is_initialized():
        # Shards need a group, also of one process that no launcher started.
        backend = "nccl" if config.run.device == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return accelerator, World.join(accelerator.device, timeout)


def leave() -> None:
    """End the group of processes: else a process may abort at its end, whatever its status."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with so many CPU threads inside the block; None leaves their number."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refuse_many_processes() -> None:
    """ValueError where a launcher started, or was asked for, more than this one process."""
    _refuse_mpi()
    if (size := _world_size()) > 1:
        raise ValueError(f"WORLD_SIZE={size}: this is for one process; start it without torchrun")
    # One process of torchrun would still be made a process group.
    if _has_local_rank():
        raise ValueError("LOCAL_RANK is set: start this without torchrun or --multi_gpu")
    _refuse_missing_processes(f"give it {_ONE}")


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if not text.isdecimal() or text == "0":
        raise ValueError(f"WORLD_SIZE={text}: a positive number is needed; unset it")
    return int(text)


def _has_local_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "-1").strip() not in ("", "-1")


def _refuse_unshared(config: RunConfig, size: int) -> None:
    consistency = config.consistency
    if consistency.ordered and size > 1 and consistency.gradient_leaves.count == 1:
        raise ValueError(
            f"WORLD_SIZE={size}: several processes share the leaves of a gradient: set "
            f"consistency.gradient_leaves to {size} or more (another order than that of 1), set "
            "consistency.ordered to false (the weights then depend on the number of processes), "
            "or start one process"
        )
    if consistency.ordered:
        consistency.gradient_leaves.inner_size(size, 1)
        return
    for problem in leaf_problems(config, LeafOrder(size)):
        raise ValueError(
            f"consistency.ordered is false, and each of {size} processes computes one leaf: "
            f"{problem.partition('. ')[0]}. Start fewer processes, or set "
            "training.micro_batch_size lower"
        )


def _refuse_mpi() -> None:
    sizes = {name: os.environ[name] for name in _MPI_SIZES if name in os.environ}
    if many := [f"{name}={size}" for name, size in sizes.items() if size.strip() not in ("", "1")]:
        raise ValueError(f"{many[0]}: start processes with accelerate launch or torchrun, not MPI")


def _refuse_missing_processes(remedy: str) -> None:
    # Without a GPU `accelerate launch` starts one process whatever it was asked for, and says so
    # only by naming a meeting point.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if launched and not _has_local_rank():
        raise ValueError(
            f"accelerate launch was asked for several processes and started one: {remedy}"
        )


def _unhonoured(device: str) -> Iterator[str]:
    """`setting: reason and remedy` for each one that a run does not follow."""

    def given(name: str, default: str) -> str:
        return os.environ.get(f"ACCELERATE_{name}", default).strip().lower()

    if (precision := given("MIXED_PRECISION", "no")) not in ("", "no"):
        yield f"--mixed_precision {precision}: policy.dtype decides; autocast would change bits"
    steps = given("GRADIENT_ACCUMULATION_STEPS", _launcher_steps())
    if steps not in ("", "1"):
        remedy = "training.micro_batch_size decides how a batch is cut, and changes no bit"
        yield f"--gradient_accumulation_steps {steps}: {remedy}"
    if (backend := given("DYNAMO_BACKEND", "no")) not in ("", "no"):
        yield f"--dynamo_backend {backend}: a compiled training step is not covered; leave it out"
    for engine in _PARALLEL:
        if is_on(engine):
            kinds = "tensor, pipeline, context and sequence parallelism are not covered"
            yield f"{engine}: processes share sequences; {kinds}; leave it out"
    if is_on("ACCELERATE_USE_CPU") and device != "cpu":
        yield f"--cpu: the recipe says run.device {device}; set one of them"
    if (forced := given("TORCH_DEVICE", device).partition(":")[0]) != device:
        yield f"ACCELERATE_TORCH_DEVICE {forced}: the recipe says run.device {device}"


def _launcher_steps() -> str:
    """The gradient accumulation on the command line of `accelerate launch`, our parent process.

    It hands this setting on to DeepSpeed only, and drops it otherwise.
    """
    line = Path(f"/proc/{os.getppid()}/cmdline")
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or not line.is_file():
        return "1"
    words = line.read_text("utf-8", errors="replace")
    found = re.search(r"\0--gradient[_-]accumulation[_-]steps[\0=]([^\0]*)", words)
    return found[1] if found else "1"
