"""Models to verify without downloading anything: tiny ones of every family, and real shapes.

Each tiny one has what its family adds to the forward path: biases, qk-norm, tied embeddings, a
sliding window, scaled RoPE. The real ones have the published configuration and random weights.
Weights carry outlier channels over a wide exponent range, as trained ones do; evenly sized weights
would hide a lost low bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rl_consistency.kernels.core.operand import DTYPES

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id"),
)


def _sized(model_type: str, *sizes: int, **options: Any) -> dict[str, Any]:
    return {"model_type": model_type} | dict(zip(_SIZES, sizes, strict=True)) | options


def _rope(theta: float, rope_type: str = "default", **options: float) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta} | options


_TINY = (331, 96, 208, 2, 4, 2, 32, 2048, 0, 1)


def _llama3_rope(theta: float, factor: float, original: int) -> dict[str, Any]:
    factors = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _rope(theta, "llama3", **factors, original_max_position_embeddings=original)


_LLAMA = {"attention_bias": True, "mlp_bias": True}
_LLAMA |= {"rope_parameters": _llama3_rope(10000.0, 8.0, 256)}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 12, "num_experts_per_tok": 3}
_EXPERTS |= {"norm_topk_prob": True, "mlp_only_layers": [0]}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny-qwen3": _sized("qwen3", *_TINY, tie_word_embeddings=True),
    "tiny-llama": _sized("llama", *_TINY, **_LLAMA),
    "tiny-qwen2": _sized("qwen2", *_TINY, tie_word_embeddings=True),
    "tiny-mistral": _sized("mistral", *_TINY, sliding_window=100),
    "tiny-qwen3-moe": _sized("qwen3_moe", *_TINY, **_EXPERTS),
    "tiny-olmoe": _sized(
        "olmoe", 331, 96, 48, 2, 6, 2, 16, 2048, 0, 1, num_experts=8, num_experts_per_tok=2
    ),
    "tiny-mixtral": _sized("mixtral", *_TINY, **_MIXTRAL),
}
"""Tiny model -> its whole configuration; one of every family."""


_QWEN: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_parameters": _rope(1_000_000.0)}


def _qwen3(*sizes: int, tied: bool) -> dict[str, Any]:
    other = (8, 128, 40_960, 151_643, 151_645)
    return _sized("qwen3", 151_936, *sizes, *other, tie_word_embeddings=tied, **_QWEN)


def _qwen2(*sizes: int) -> dict[str, Any]:
    return _sized("qwen2", 151_936, *sizes, 151_643, 151_643, tie_word_embeddings=True, **_QWEN)


def _llama3(*sizes: int, tied: bool, rope: dict[str, Any]) -> dict[str, Any]:
    options = {"tie_word_embeddings": tied, "rms_norm_eps": 1e-5, "rope_parameters": rope}
    return _sized("llama", 128_256, *sizes, 128_000, 128_001, **options)


_llama32 = partial(_llama3, tied=True, rope=_llama3_rope(500_000.0, 32.0, 8192))

REAL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "llama3-8b": _llama3(*(4096, 14_336, 32, 32, 8, 128, 8192), tied=False, rope=_rope(500_000.0)),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 64, 32_768),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 128, 131_072),
    "llama3.2-1b": _llama32(2048, 8192, 16, 32, 8, 64, 131_072),
    "llama3.2-3b": _llama32(3072, 8192, 28, 24, 8, 128, 131_072),
}
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
