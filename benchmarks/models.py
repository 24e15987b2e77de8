"""The models of the benches by name: presets, their first layers, and dense models whose name says
their sizes."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from rl_consistency.models.families import FAMILIES, SPARSE, check_config
from rl_consistency.verify.presets import PRESETS, REAL_PRESETS, build_lifelike

DENSE = tuple(family for family in FAMILIES if family not in SPARSE)
NAME = re.compile(rf"({'|'.join(DENSE)})-(\d+)x(\d+)-(\d+)/(\d+)x(\d+)-(\d+)-(\d+)(-tied)?")
"""`qwen3-3x1088-20/4x80-3456-50304-tied`: a family, `SIZES`, and whether the LM head is the
embedding."""
SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size"),
)
FIRST_LAYERS = re.compile(r"(.+)-(\d+)l")
"""`mixtral-8x7b-2l` is the first two layers of a preset."""

SPARSE_PRESETS = json.loads(Path(__file__).with_name("sparse_models.json").read_text("utf-8"))
WHOLE = {**PRESETS, **REAL_PRESETS, **SPARSE_PRESETS}
"""Model -> its whole configuration; the mixtures of experts of the benches come last."""
SIZED = {
    "qwen2.5-7b": "qwen2-28x3584-28/4x128-18944-152064",
    "qwen3-4b": "qwen3-36x2560-32/8x128-9728-151936-tied",
    "llama3.1-8b": "llama-32x4096-32/8x128-14336-128256",
    "mistral-7b": "mistral-32x4096-32/8x128-14336-32768",
}
"""Published dense models -> the name that says their sizes."""


def named_options(name: str) -> dict[str, Any]:
    """The configuration of which `NAME` says the sizes; ValueError on another name, and on heads
    that transformers refuses."""
    if (found := NAME.fullmatch(name)) is None:
        raise ValueError(
            f"no model {name!r}; give {', '.join((*WHOLE, *SIZED))}, one of these with -4l for its "
            "first four layers, or sizes, such as qwen3-3x1088-20/4x80-3456-50304: family, layers "
            "x hidden size, query heads / key heads x head size, intermediate size, vocabulary, "
            f"perhaps -tied. Families: {', '.join(DENSE)}."
        )
    family, *numbers, tied = found.groups()
    sizes = dict(zip(SIZES, map(int, numbers), strict=True))
    if family != "qwen3" and sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ValueError(
            f"model {name!r}: transformers wants the hidden size of {family} to be a multiple of "
            "the number of query heads; qwen3 is free in this."
        )
    other = {"max_position_embeddings": 32768, "sliding_window": None}
    return {"model_type": family, **sizes, **other, "tie_word_embeddings": tied is not None}


def model_config(name: str) -> Any:
    """The configuration of a model of the benches; ValueError on a name of no such model, and on
    sizes that no canonical order covers."""
    cut = FIRST_LAYERS.fullmatch(name)
    preset = cut[1] if cut else name
    options = dict(WHOLE.get(preset) or named_options(SIZED.get(preset, name)))
    if cut:
        layers, most = int(cut[2]), options["num_hidden_layers"]
        if not 1 <= layers <= most:
            raise ValueError(f"model {preset!r} has {most} layers, not {layers}.")
        options["num_hidden_layers"] = layers
    check_config(config := AutoConfig.for_model(options.pop("model_type"), **options))
    return config


def is_sparse(name: str) -> bool:
    """Whether a model of the benches is a mixture of experts."""
    return model_config(name).model_type in SPARSE


def build_model(name: str, device: torch.device) -> nn.Module:
    """A model of the benches in bf16, with random weights, in evaluation mode."""
    return build_lifelike(model_config(name), torch.bfloat16, device=device)


def twin(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own, in the memory of the model's weights."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach()) for p in model.parameters()}
    return deepcopy(model, shared)
