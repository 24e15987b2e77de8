"""The strategy that `accelerate launch` asks for, and which of its settings a strategy follows.

accelerate's own plugins for FSDP and DeepSpeed stay off: a strategy does what they were asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import str_to_bool

from rl_consistency.trainers.config.learning_sections import StrategyName

FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
STAGES: dict[str, StrategyName] = {"1": "zero1", "2": "zero2", "3": "zero3"}

_MICRO_BATCHES = "training.micro_batch_size decides how a batch is cut, and changes no bit"
_PRECISION = "policy.dtype decides, and gradients are fp32"
_OFFLOAD = "nothing is offloaded: weights and moments stay on the device that computes"
_EXPERTS = "experts are sharded like other weights; leave it out"
_LAYERS = "each decoder layer is sharded, and what is around them; leave it out"

_SETTINGS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    FSDP: {
        "FSDP_OFFLOAD_PARAMS": (("false",), _OFFLOAD),
        "FSDP_RESHARD_AFTER_FORWARD": (("true",), "a layer's weights are freed after its pass"),
        "FSDP_FORWARD_PREFETCH": (("false",), "FSDP2 has none; leave it out"),
        "FSDP_ACTIVATION_CHECKPOINTING": (("false",), "policy.gradient_checkpointing decides"),
        "FSDP_AUTO_WRAP_POLICY": (("transformer_based_wrap",), _LAYERS),
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ((), _LAYERS),
        "FSDP_IGNORED_MODULES": ((), _LAYERS),
    },
    DEEPSPEED: {
        "ACCELERATE_GRADIENT_CLIPPING": (("auto", "0", "0.0"), "optimizer.max_grad_norm decides"),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ((), _OFFLOAD),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ((), _OFFLOAD),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": (("false",), "each process loads the whole policy"),
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ((), _EXPERTS),
    },
}
"""Engine -> variable -> (allowed values, reason). Empty and `none` are always allowed."""

_FREE = (
    "zero_optimization.stage",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",  # checkpoints are whole
)
"""Keys of DeepSpeed's configuration that may have any value."""
_REASONS = {
    "gradient_clipping": "optimizer.max_grad_norm decides",
    "gradient_accumulation_steps": _MICRO_BATCHES,
    "train_batch_size": "rollout.prompts_per_step and algorithm.updates_per_rollout decide",
    "train_micro_batch_size_per_gpu": _MICRO_BATCHES,
    "optimizer": "the recipe's section optimizer decides",
    "scheduler": "the recipe's section optimizer decides",
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "amp": _PRECISION,
    "communication_data_type": _PRECISION,
    "data_types": _PRECISION,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
}
"""Section or key of DeepSpeed's configuration -> what decides in its place."""


def strategy_of(given: StrategyName | None) -> StrategyName:
    """`training.strategy`, else what the launcher asks for, else replicated.

    ValueError where the two differ, and for an engine that no strategy stands for.
    """
    asked = _asked()
    if given is not None and asked is not None and given != asked:
        engine = FSDP if asked == "fsdp2" else f"{DEEPSPEED}, ZeRO stage {asked[-1]}"
        raise ValueError(
            f"training.strategy is {given}, and accelerate launch asks for {asked} ({engine}): "
            "leave one of them out, or set both to the same"
        )
    return given or asked or "replicated"


def unfollowed(dtype: str) -> Iterator[str]:
    """`setting: reason` for each setting of accelerate's engines that a run does not follow.

    `dtype` is `policy.dtype`.
    """
    for engine, settings in _SETTINGS.items():
        for name, (allowed, reason) in settings.items() if is_on(engine) else ():
            text = os.environ.get(name, "").strip()
            if text.lower() not in ("", "none", *allowed):
                yield f"{name} {text}: {reason}"
    if is_on(DEEPSPEED):
        yield from _unfollowed_in_file(_deepspeed_file(), dtype)


@contextmanager
def engines_off() -> Iterator[None]:
    """Inside the block accelerate and transformers see a launcher without FSDP and DeepSpeed."""
    taken = {name: os.environ.pop(name) for name in _SETTINGS if name in os.environ}
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
        raise ValueError(
            f"{name} {text}: accelerate reads it as true or false; set it to one, or unset it"
        ) from error


def _asked() -> StrategyName | None:
    if is_on(FSDP) and is_on(DEEPSPEED):
        raise ValueError(f"{FSDP} and {DEEPSPEED}: a run has one strategy; unset one of them")
    if is_on(FSDP):
        if (version := os.environ.get("FSDP_VERSION", "1").strip()) != "2":
            raise ValueError(
                f"FSDP_VERSION {version}: FSDP1 flattens parameters, and no order covers that; set "
                "fsdp_version to 2"
            )
        return "fsdp2"
    if not is_on(DEEPSPEED):
        return None
    if (stage := _stage()) not in STAGES:
        raise ValueError(
            f"DeepSpeed's ZeRO stage {stage}: the stages are {', '.join(STAGES)}; where each "
            "process is to hold all, start with --multi_gpu and without DeepSpeed"
        )
    return STAGES[stage]


def _stage() -> str:
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "").strip()
    if not (tree := _deepspeed_file()):
        return stage or "2"  # accelerate's default
    section = tree.get("zero_optimization")
    own = str(section.get("stage", 0)) if isinstance(section, dict) else "0"
    if own != "auto" and stage not in ("", own):
        raise ValueError(f"ZeRO stage {stage} and, in deepspeed_config_file, {own}: give one")
    return (stage or "2") if own == "auto" else own


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
            reasons = [
                reason for key, reason in _REASONS.items() if f"{path}.".startswith(f"{key}.")
            ]
            reason = reasons[0] if reasons else "a run does not follow it; leave it out"
            yield f"deepspeed_config_file: {path} {json.dumps(value)}: {reason}"
    section = tree.get("bf16")
    if isinstance(section, dict) and section.get("enabled") is False and dtype == "bfloat16":
        yield f"deepspeed_config_file: bf16.enabled false: policy.dtype is {dtype}; leave it out"


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
