"""What started this process, and whether a run can honour what the launcher was asked for.

A run is one process whose precision, micro-batches and device stand in its recipe. `accelerate
launch`, `torchrun` and `mpirun` hand their settings on as environment variables. One that a run
would have to ignore is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from accelerate.utils import str_to_bool

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
_ONE = "--num_processes 1 --num_machines 1"


def check_launch(device: str = "cpu") -> None:
    """ValueError, with every setting and its remedy, where the launcher asks for what is not done.

    `device` is `run.device`, "cpu" or "cuda".
    """
    refuse_many_processes()
    if problems := list(_unhonoured(os.environ, device)):
        raise ValueError("; ".join(problems))


def refuse_many_processes() -> None:
    """ValueError where a launcher started, or was asked for, more than this one process."""
    sizes = {name: os.environ[name] for name in _SIZES if name in os.environ}
    if many := [f"{name}={size}" for name, size in sizes.items() if size.strip() not in ("", "1")]:
        raise ValueError(f"{many[0]}: a run is one process, not several; start it without torchrun")
    # One process of torchrun would still be made a process group.
    if os.environ.get("LOCAL_RANK", "-1").strip() not in ("", "-1"):
        raise ValueError("LOCAL_RANK is set: start a run without torchrun or --multi_gpu")
    # Without a GPU `accelerate launch` starts one process whatever it was asked for, and says so
    # only by naming a meeting point.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        raise ValueError(
            f"accelerate launch was asked for several processes; a run is one: give it {_ONE}"
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
            yield f"ACCELERATE_USE_{engine}: a run is one process on one device; leave it out"
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
