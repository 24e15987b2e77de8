"""Tiny models of the covered families, for checking the whole chain without downloading anything.

Each has what its family adds to the forward path: biases, qk-norm, tied embeddings, a sliding
window, scaled RoPE. Weights carry outlier channels over a wide exponent range, as trained ones do;
evenly sized weights would hide a lost low bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.kernels.operand import DTYPES

_SHAPE = {
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
        "tiny-qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
        "tiny-llama": {
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
        "tiny-qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
        "tiny-mistral": {"model_type": "mistral", "sliding_window": 100},
    }
)
"""Preset name -> what its config adds to the common shape."""

OUTLIER_SHARE = 16
"""One input channel in this many is an outlier."""


def build_preset(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    """A tiny causal LM in evaluation mode, on the CPU.

    Args:
        name: a key of `PRESETS`.
        dtype: fp32, bf16 or fp16.
        seed: of the weights; the process-wide random state is left as it was.

    Raises:
        ValueError: an unknown preset.
        TypeError: a dtype without a canonical order.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}.")
    if dtype not in DTYPES:
        allowed = ", ".join(str(d) for d in DTYPES)
        raise TypeError(f"no canonical order for {dtype}; allowed: {allowed}.")
    options = dict(PRESETS[name])
    config = AutoConfig.for_model(options.pop("model_type"), **(_SHAPE | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            _make_lifelike(parameter, generator)
    return model.to(dtype).eval()


def _make_lifelike(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Weights of unit gain with outlier channels; norm weights around 1; small biases."""
    shape, channels = parameter.shape, parameter.shape[-1]
    values = torch.randn(shape, generator=generator)
    if parameter.dim() == 1:
        is_norm = bool((parameter == 1).all())
        parameter.copy_(1 + 0.2 * values if is_norm else 0.1 * values)
        return
    spread = torch.randint(-4, 2, shape, generator=generator)
    outliers = torch.randperm(channels, generator=generator)[: max(channels // OUTLIER_SHARE, 1)]
    spread[:, outliers] += torch.randint(1, 4, (len(outliers),), generator=generator)
    values = torch.ldexp(values, spread)
    parameter.copy_(values / values.square().sum(dim=1).mean().sqrt())
