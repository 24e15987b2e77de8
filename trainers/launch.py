"""What started this process, and whether a run can honour what the launcher was asked for.

Precision, micro-batches and device of a run stand in its recipe. `accelerate launch`, `torchrun`
and `mpirun` hand their settings on as environment variables. One that a run would have to ignore is
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import str_to_bool

from rl_consistency.distributed.leaves import LeafOrder
from rl_consistency.trainers.config.recipe import RunConfig

_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
_ONE = "--num_processes 1 --num_machines 1"


def is_first_process() -> bool:
    """Whether this is the process that writes files and speaks."""
    return _world_size() == 1 or os.environ.get("RANK", "").strip() in ("", "0")


def check_launch(device: str = "cpu", leaves: LeafOrder = LeafOrder(1)) -> None:  # noqa: B008
    """ValueError, with every setting and its remedy, where the launcher asks for what is not done.

    `device` is `run.device`, "cpu" or "cuda"; `leaves` is `consistency.gradient_leaves`.
    """
    _refuse_mpi()
    size = _world_size()
    if size > 1 and leaves.count == 1:
        raise ValueError(
            f"WORLD_SIZE={size}: several processes share the leaves of a gradient: set "
            f"consistency.gradient_leaves to {size} or more (another order than that of 1), or "
            "start one process"
        )
    if size > 1 and os.environ.get("LOCAL_RANK", "").strip() == "":
        raise ValueError(
            f"WORLD_SIZE={size} without LOCAL_RANK: unset it, or start the processes with "
            "accelerate launch or torchrun"
        )
    leaves.inner_size(size, 1)
    _refuse_missing_processes(
        "on a CPU set ACCELERATE_USE_CPU=true and give it --multi_gpu --num_processes N, or use "
        f"torchrun; for one process give it {_ONE}"
    )
    if problems := list(_unhonoured(os.environ, device)):
        raise ValueError("; ".join(problems))


def check_machine(config: RunConfig) -> None:
    """ValueError where this process cannot do what the recipe says, before anything is computed."""
    check_launch(config.run.device, config.consistency.gradient_leaves)
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "run.device is cuda but torch sees no GPU here; set it to cpu, or install a CUDA build"
        )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many CPU threads inside the block; None leaves them."""
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
    if os.environ.get("LOCAL_RANK", "-1").strip() not in ("", "-1"):
        raise ValueError("LOCAL_RANK is set: start this without torchrun or --multi_gpu")
    _refuse_missing_processes(f"give it {_ONE}")


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if not text.isdecimal() or text == "0":
        raise ValueError(f"WORLD_SIZE={text}: a positive number is needed; unset it")
    return int(text)


def _refuse_mpi() -> None:
    sizes = {name: os.environ[name] for name in _MPI_SIZES if name in os.environ}
    if many := [f"{name}={size}" for name, size in sizes.items() if size.strip() not in ("", "1")]:
        raise ValueError(f"{many[0]}: start processes with accelerate launch or torchrun, not MPI")


def _refuse_missing_processes(remedy: str) -> None:
    # Without a GPU `accelerate launch` starts one process whatever it was asked for, and says so
    # only by naming a meeting point.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if launched and os.environ.get("LOCAL_RANK", "-1").strip() in ("", "-1"):
        raise ValueError(
            f"accelerate launch was asked for several processes and started one: {remedy}"
        )


def _unhonoured(environment: Mapping[str, str], device: str) -> Iterator[str]:
    """`setting: reason and remedy` for each one that a run does not follow."""

    def given(name: str, default: str) -> str:
        return environment.get(f"ACCELERATE_{name}", default).strip().lower()

    if (precision := given("MIXED_PRECISION", "no")) not in ("", "no"):
        yield f"--mixed_precision {precision}: policy.dtype decides; autocast would change bits"
    steps = given("GRADIENT_ACCUMULATION_STEPS", _launcher_steps(environment))
    if steps not in ("", "1"):
        remedy = "training.micro_batch_size decides how a batch is cut, and changes no bit"
        yield f"--gradient_accumulation_steps {steps}: {remedy}"
    if (backend := given("DYNAMO_BACKEND", "no")) not in ("", "no"):
        yield f"--dynamo_backend {backend}: a compiled training step is not covered; leave it out"
    for engine in _ENGINES:
        if (yield from _is_true(environment, f"ACCELERATE_USE_{engine}")):
            yield f"ACCELERATE_USE_{engine}: training.strategy is replicated; leave it out"
    if (yield from _is_true(environment, "ACCELERATE_USE_CPU")) and device != "cpu":
        yield f"--cpu: the recipe says run.device {device}; set one of them"
    if (forced := given("TORCH_DEVICE", device).partition(":")[0]) != device:
        yield f"ACCELERATE_TORCH_DEVICE {forced}: the recipe says run.device {device}"


def _is_true(environment: Mapping[str, str], name: str) -> Generator[str, None, bool]:
    """Whether accelerate takes the value for true; a problem where it takes it for nothing."""
    text = environment.get(name, "false")
    try:
        return str_to_bool(text) == 1
    except ValueError:
        yield f"{name} {text}: accelerate reads it as true or false; set it to one, or unset it"
        return False


def _launcher_steps(environment: Mapping[str, str]) -> str:
    """The gradient accumulation on the command line of `accelerate launch`, our parent process.

    It hands this setting on to DeepSpeed only, and drops it otherwise.
    """
    line = Path(f"/proc/{os.getppid()}/cmdline")
    if "ACCELERATE_MIXED_PRECISION" not in environment or not line.is_file():
        return "1"
    words = line.read_text("utf-8", errors="replace")
    found = re.search(r"\0--gradient[_-]accumulation[_-]steps[\0=]([^\0]*)", words)
    return found[1] if found else "1"
