"""Models to verify without downloading anything: tiny ones of every family, and real shapes.

Each tiny one has what its family adds to the forward path: biases, qk-norm, tied embeddings, a
sliding window, scaled RoPE. The real ones have the published configuration and random weights.
Weights carry outlier channels over a wide exponent range, as trained ones do; evenly sized weights
would hide a lost low bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rl_consistency.kernels.core.operand import DTYPES

_CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

PRESETS: Mapping[str, Mapping[str, Any]] = _CONFIGS["tiny"]
"""Tiny model -> its whole configuration; one of every family."""

REAL_PRESETS: Mapping[str, Mapping[str, Any]] = _CONFIGS["real"]
"""Model of real shape -> its whole published configuration; meant for a GPU."""


def known_presets() -> tuple[str, ...]:
    """Every preset name, tiny ones first."""
    return (*PRESETS, *REAL_PRESETS)


def preset_config(name: str, *, num_layers: int | None = None) -> PreTrainedConfig:
    """The transformers configuration of a preset, cut to its first layers if a number is given.
    An unknown preset, or a number of layers it does not have, is a ValueError."""
    if name not in known_presets():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(known_presets())}.")
    options = dict({**PRESETS, **REAL_PRESETS}[name])
    most = options["num_hidden_layers"]
    options["num_hidden_layers"] = most if num_layers is None else num_layers
    if not 1 <= options["num_hidden_layers"] <= most:
        raise ValueError(f"{name} has {most} layers; num_layers is {num_layers}.")
    return AutoConfig.for_model(options.pop("model_type"), **options)


def build_preset(
    name: str, dtype: torch.dtype = torch.float32, *, num_layers: int | None = None, **options: Any
) -> nn.Module:
    """A preset as `build_lifelike` makes it, cut to its first layers if a number is given."""
    return build_lifelike(preset_config(name, num_layers=num_layers), dtype, **options)


def build_lifelike(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A causal LM of a configuration, in evaluation mode, with random weights.

    The weights are fp32 values rounded once, drawn on the device the model will live on; they
    differ between kinds of devices. The process-wide random state is left as it was. A dtype
    without a canonical order is a TypeError.
    """
    if dtype not in DTYPES:
        raise TypeError(f"no canonical order for {dtype}; allowed: {', '.join(map(str, DTYPES))}.")
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            make_lifelike(parameter, generator)
    return model.eval()


def make_lifelike(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Weights of unit gain, one input channel in 16 an outlier; norm weights around 1; small
    biases."""
    shape, channels = parameter.shape, parameter.shape[-1]
    drawn: dict[str, Any] = {"generator": generator, "device": generator.device}
    values = torch.randn(shape, **drawn)
    if parameter.dim() == 1:
        is_norm = bool((parameter == 1).all())
        parameter.copy_(1 + 0.2 * values if is_norm else 0.1 * values)
        return
    spread = torch.randint(-4, 2, shape, dtype=torch.int32, **drawn)
    outliers = torch.randperm(channels, **drawn)[: max(channels // 16, 1)]
    spread[..., outliers] += torch.randint(1, 4, (len(outliers),), dtype=torch.int32, **drawn)
    values = torch.ldexp(values, spread)
    parameter.copy_(values / values.square().sum(dim=-1).mean().sqrt())
