"""What started this process, and whether a run can honour what the launcher was asked for.

Precision, micro-batches and device of a run stand in its recipe. `accelerate launch`, `torchrun`
and `mpirun` hand their settings on as environment variables. One that a run would have to ignore is
refused. accelerate's own plugins for FSDP and DeepSpeed stay off: a strategy does what they were
asked for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import str_to_bool

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import CollectiveError, World
from rl_consistency.trainers.config.learning_sections import StrategyName
from rl_consistency.trainers.config.recipe import RunConfig, part_problems, strategy_problems

_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_PARALLEL = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
_ONE = "--num_processes 1 --num_machines 1"
_MICRO_BATCHES = "training.micro_batch_size decides how a batch is cut, and changes no bit"


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
        remedy = "unset it, or start the processes with accelerate launch or torchrun"
        raise ValueError(f"WORLD_SIZE={size} without LOCAL_RANK: {remedy}")
    _refuse_missing_processes(
        "on a CPU set ACCELERATE_USE_CPU=true and give it --multi_gpu --num_processes N, or use "
        f"torchrun; for one process give it {_ONE}"
    )
    strategy = strategy_of(config.training.strategy)
    problems = [*_unhonoured(config.run.device), *unfollowed(config.policy.dtype)]
    if problems := [*problems, *strategy_problems(config, strategy)]:
        raise ValueError("; ".join(problems))


def check_machine(config: RunConfig) -> RunConfig:
    """The recipe with the strategy that holds here.

    ValueError where this process cannot do what the recipe says, before anything is computed.
    """
    check_launch(config)
    strategy = strategy_of(config.training.strategy)
    if config.run.device == "cuda" and not torch.cuda.is_available():
        remedy = "set it to cpu, or install a CUDA build"
        raise ValueError(f"run.device is cuda but torch sees no GPU here; {remedy}")
    if strategy.startswith("zero") and find_spec("deepspeed") is None:
        remedy = "pip install 'rl-consistency[deepspeed]', or set it to fsdp2"
        raise ValueError(f"training.strategy {strategy}: deepspeed is not installed: {remedy}")
    if config.optimizer.name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        remedy = "pip install 'rl-consistency[8bit]', or set it to adamw"
        raise ValueError(f"optimizer.name adamw_8bit: bitsandbytes is not installed: {remedy}")
    training = config.training.model_copy(update={"strategy": strategy})
    return config.model_copy(update={"training": training})


def join(config: RunConfig) -> World:
    """This process among those of the run; a group of processes is made where there is none yet."""
    timeout = timedelta(seconds=config.run.collective_timeout)
    cpu, handlers = config.run.device == "cpu", InitProcessGroupKwargs(timeout=timeout)
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[handlers])
    except dist.DistError as error:
        limit, problem = config.run.collective_timeout, str(error).splitlines()[0]
        raise CollectiveError(
            f"not all processes of this run came within run.collective_timeout={limit} seconds "
            f"({problem}). Look at the output of the others."
        ) from error
    if config.training.strategy != "replicated" and not dist.is_initialized():
        # Shards need a group, also of one process that no launcher started.
        backend = "nccl" if config.run.device == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return World.join(accelerator.device, timeout)


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
    leaves, ordered = config.consistency.gradient_leaves, config.consistency.ordered
    if ordered and size > 1 and leaves.count == 1:
        raise ValueError(
            f"WORLD_SIZE={size}: start one process, set consistency.gradient_leaves to {size} or "
            "more (another order than that of 1), or set consistency.ordered to false (the weights "
            "then depend on the number of processes)"
        )
    if ordered:
        leaves.inner_size(size, 1)
        return
    for problem in part_problems(config, PartOrder(size)):
        raise ValueError(
            f"consistency.ordered is false, and each of {size} processes computes one leaf: "
            f"{problem.partition('. ')[0]}. Start fewer, or set training.micro_batch_size lower"
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
        problem = "accelerate launch was asked for several processes and started one"
        raise ValueError(f"{problem}: {remedy}")


def _unhonoured(device: str) -> Iterator[str]:
    """`setting: reason and remedy` for each one that a run does not follow."""

    def given(name: str, default: str) -> str:
        return os.environ.get(f"ACCELERATE_{name}", default).strip().lower()

    if (precision := given("MIXED_PRECISION", "no")) not in ("", "no"):
        yield f"--mixed_precision {precision}: policy.dtype decides; autocast would change bits"
    steps = given("GRADIENT_ACCUMULATION_STEPS", _launcher_steps())
    if steps not in ("", "1"):
        yield f"--gradient_accumulation_steps {steps}: {_MICRO_BATCHES}"
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
    """The gradient accumulation on the command line of `accelerate launch`, which started us.

    It hands this setting on to DeepSpeed only, and drops it otherwise.
    """
    process = os.getppid() if "ACCELERATE_MIXED_PRECISION" in os.environ else 0
    while process > 1 and (place := Path(f"/proc/{process}")).is_dir():
        words = (place / "cmdline").read_text("utf-8", errors="replace")
        found = re.search(r"\0--gradient[_-]accumulation[_-]steps[\0=]([^\0]*)", words)
        if found:
            return found[1]
        process = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    return "1"


FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
STAGES: dict[str, StrategyName] = {"1": "zero1", "2": "zero2", "3": "zero3"}

_ALLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    FSDP: {
        "FSDP_OFFLOAD_PARAMS": ("false",),
        "FSDP_RESHARD_AFTER_FORWARD": ("true",),
        "FSDP_FORWARD_PREFETCH": ("false",),
        "FSDP_ACTIVATION_CHECKPOINTING": ("false",),
        "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap",),
        "FSDP_TRANSFORMER_CLS_TO_WRAP": (),
        "FSDP_IGNORED_MODULES": (),
    },
    DEEPSPEED: {
        "ACCELERATE_GRADIENT_CLIPPING": ("auto", "0", "0.0"),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("false",),
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": (),
    },
}
"""Engine -> variable -> its allowed values. Empty and `none` are always allowed."""

_FREE = (
    "zero_optimization.stage",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",  # checkpoints are whole
)
"""Keys of DeepSpeed's configuration that may have any value."""
_UNFOLLOWED = "the recipe decides this (docs/distributed.md tells by which key): leave it out"


def strategy_of(given: StrategyName | None) -> StrategyName:
    """`training.strategy`, else what the launcher asks for, else replicated.

    ValueError where the two differ, and for an engine that no strategy stands for.
    """
    asked = _asked()
    if given is not None and asked is not None and given != asked:
        engine = FSDP if asked == "fsdp2" else f"{DEEPSPEED}, ZeRO stage {asked[-1]}"
        problem = f"is {given}, and accelerate launch asks for {asked} ({engine})"
        raise ValueError(f"training.strategy {problem}: leave one of them out, or set both alike")
    return given or asked or "replicated"


def unfollowed(dtype: str) -> Iterator[str]:
    """`setting: reason` for each setting of accelerate's engines that a run does not follow, with a
    policy of this dtype."""
    for engine, settings in _ALLOWED.items():
        for name, allowed in settings.items() if is_on(engine) else ():
            text = os.environ.get(name, "").strip()
            if text.lower() not in ("", "none", *allowed):
                yield f"{name} {text}: {_UNFOLLOWED}"
    if is_on(DEEPSPEED):
        yield from _unfollowed_in_file(_deepspeed_file(), dtype)


@contextmanager
def engines_off() -> Iterator[None]:
    """Inside the block accelerate and transformers see a launcher without FSDP and DeepSpeed."""
    taken = {name: os.environ.pop(name) for name in _ALLOWED if name in os.environ}
    try:
        yield
    finally:
        os.environ |= taken


def is_on(name: str) -> bool:
    """Whether accelerate takes a variable for true; ValueError where it takes it for neither."""
    text = os.environ.get(name, "false")
    try:
        return str_to_bool(text) == 1
    except ValueError as error:
        raise ValueError(f"{name} {text}: must be true or false; set it so, or unset it") from error


def _asked() -> StrategyName | None:
    if is_on(FSDP) and is_on(DEEPSPEED):
        raise ValueError(f"{FSDP} and {DEEPSPEED}: a run has one strategy; unset one of them")
    if is_on(FSDP):
        if (version := os.environ.get("FSDP_VERSION", "1").strip()) != "2":
            problem = f"FSDP_VERSION {version}: FSDP1 flattens parameters, which no order covers"
            raise ValueError(f"{problem}; set fsdp_version to 2")
        return "fsdp2"
    if not is_on(DEEPSPEED):
        return None
    section = _deepspeed_file().get("zero_optimization")
    own = str(section.get("stage", 0)) if isinstance(section, dict) else "0"
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "").strip()
    if _deepspeed_file() and own != "auto":
        if stage not in ("", own):
            raise ValueError(f"ZeRO stage {stage} and, in deepspeed_config_file, {own}: give one")
        stage = own
    if (stage := stage or "2") not in STAGES:  # accelerate's default
        other = "to replicate, start with --multi_gpu and without DeepSpeed"
        raise ValueError(f"ZeRO stage {stage}: the stages are {', '.join(STAGES)}; {other}")
    return STAGES[stage]


def _deepspeed_file() -> dict[str, Any]:
    name = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if name == "none":
        return {}
    try:
        tree = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed_config_file {name} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"deepspeed_config_file {name} must hold an object of settings")
    return tree


def _unfollowed_in_file(tree: Mapping[str, Any], dtype: str) -> Iterator[str]:
    followed = {
        "bf16.enabled": dtype == "bfloat16",
        "gradient_accumulation_steps": 1,
        "communication_data_type": "fp32",
        "data_types.grad_accum_dtype": "fp32",
    }
    for path, value in _said(tree):
        if path not in _FREE and (path not in followed or value != followed[path]):
            yield f"deepspeed_config_file: {path} {json.dumps(value)}: {_UNFOLLOWED}"
    section = tree.get("bf16")
    if isinstance(section, dict) and section.get("enabled") is False and dtype == "bfloat16":
        yield f"deepspeed_config_file: bf16.enabled false, policy.dtype {dtype}: {_UNFOLLOWED}"


def _said(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value, without what is off or left to others."""
    for key, value in tree.items():
        if not isinstance(value, dict):
            if not _is_off(value):
                yield prefix + key, value
        elif not _is_off(value.get("enabled", value.get("device", True))):
            yield from _said(value, f"{prefix}{key}.")


def _is_off(value: Any) -> bool:
    return value is None or value in (False, "auto", "none")
