"""Models to verify without downloading anything: tiny ones of every family, and real shapes.

Each tiny one has what its family adds to the forward path: biases, qk-norm, tied embeddings, a
sliding window, scaled RoPE. The real ones have the published configuration and random weights.
Weights carry outlier channels over a wide exponent range, as trained ones do; evenly sized weights
would hide a lost low bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rl_consistency.kernels.core.operand import DTYPES

_TINY = {
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny-qwen3": _TINY | {"model_type": "qwen3", "tie_word_embeddings": True},
        "tiny-llama": _TINY
        | {
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
        "tiny-qwen2": _TINY | {"model_type": "qwen2", "tie_word_embeddings": True},
        "tiny-mistral": _TINY | {"model_type": "mistral", "sliding_window": 100},
    }
)
"""Tiny model -> its whole configuration; one of every family."""


def _published(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "tie_word_embeddings": tied,
    }


REAL_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-0.6b": _published(1024, 3072, 28, 16, tied=True),
        "qwen3-1.7b": _published(2048, 6144, 28, 16, tied=True),
        "qwen3-8b": _published(4096, 12_288, 36, 32, tied=False),
        "llama3-8b": _published(4096, 14_336, 32, 32, tied=False)
        | {
            "model_type": "llama",
            "vocab_size": 128_256,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
    }
)
"""Model of real shape -> its whole published configuration; meant for a GPU."""

OUTLIER_SHARE = 16
"""One input channel in this many is an outlier."""


def known_presets() -> tuple[str, ...]:
    """Every preset name, tiny ones first."""
    return (*PRESETS, *REAL_PRESETS)


def preset_config(name: str, *, num_layers: int | None = None) -> PreTrainedConfig:
    """The transformers configuration of a preset.

    Args:
        name: a key of `PRESETS` or `REAL_PRESETS`.
        num_layers: keep only so many layers; None keeps all.

    Raises:
        ValueError: an unknown preset, or a number of layers it does not have.
    """
    if name not in known_presets():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(known_presets())}.")
    options = {**(PRESETS[name] if name in PRESETS else REAL_PRESETS[name])}
    if num_layers is not None:
        if not 1 <= num_layers <= options["num_hidden_layers"]:
            raise ValueError(
                f"{name} has {options['num_hidden_layers']} layers; num_layers is {num_layers}."
            )
        options["num_hidden_layers"] = num_layers
    return AutoConfig.for_model(options.pop("model_type"), **options)


def build_preset(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    num_layers: int | None = None,
) -> nn.Module:
    """A causal LM in evaluation mode whose weights are drawn on the device it will live on.

    Args:
        name: a key of `PRESETS` or `REAL_PRESETS`.
        dtype: fp32, bf16 or fp16; the weights are fp32 values rounded once.
        seed: of the weights; the process-wide random state is left as it was. Every kind of device
            has a random generator of its own, and so weights of its own.
        device: where the model is built.
        num_layers: keep only so many layers; None keeps all.

    Raises:
        ValueError: an unknown preset.
        TypeError: a dtype without a canonical order.
    """
    config = preset_config(name, num_layers=num_layers)
    if dtype not in DTYPES:
        allowed = ", ".join(str(d) for d in DTYPES)
        raise TypeError(f"no canonical order for {dtype}; allowed: {allowed}.")
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            _make_lifelike(parameter, generator)
    return model.eval()


def _make_lifelike(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Weights of unit gain with outlier channels; norm weights around 1; small biases."""
    shape, channels, device = parameter.shape, parameter.shape[-1], generator.device
    values = torch.randn(shape, generator=generator, device=device)
    if parameter.dim() == 1:
        is_norm = bool((parameter == 1).all())
        parameter.copy_(1 + 0.2 * values if is_norm else 0.1 * values)
        return
    spread = torch.randint(-4, 2, shape, generator=generator, device=device, dtype=torch.int32)
    outliers = torch.randperm(channels, generator=generator, device=device)
    outliers = outliers[: max(channels // OUTLIER_SHARE, 1)]
    spread[:, outliers] += torch.randint(
        1, 4, (len(outliers),), generator=generator, device=device, dtype=torch.int32
    )
    values = torch.ldexp(values, spread)
    parameter.copy_(values / values.square().sum(dim=1).mean().sqrt())
