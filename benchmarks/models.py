"""The models of the benches by name: presets, their first layers, and dense models whose name says
their sizes."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from rl_consistency.models.families import FAMILIES, SPARSE, check_config
from rl_consistency.verify.presets import build_lifelike, known_presets, preset_config

NAME = re.compile(r"([a-z0-9]+)-(\d+)x(\d+)-(\d+)/(\d+)x(\d+)-(\d+)-(\d+)(-tied)?")
FIRST_LAYERS = re.compile(r"(.+)-(\d+)l")
"""`mixtral-8x7b-2l` is the first two layers of a preset."""
DENSE = tuple(family for family in FAMILIES if family not in SPARSE)

SPARSE_PRESETS = json.loads(Path(__file__).with_name("sparse_models.json").read_text("utf-8"))
"""Mixtures of experts of the benches -> their whole published configuration."""

SIZED = {
    "qwen2.5-7b": "qwen2-28x3584-28/4x128-18944-152064",
    "qwen3-4b": "qwen3-36x2560-32/8x128-9728-151936-tied",
    "llama3.1-8b": "llama-32x4096-32/8x128-14336-128256",
    "mistral-7b": "mistral-32x4096-32/8x128-14336-32768",
}
"""Published dense models -> their sizes as `ModelSizes` names them."""


@dataclass(frozen=True)
class ModelSizes:
    """A dense model; `qwen3-3x1088-20/4x80-3456-50304-tied` is the name of one."""

    family: str
    """One of `DENSE`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the LM head is the embedding."""

    @classmethod
    def named(cls, name: str) -> ModelSizes | None:
        """The sizes of a name; None where it is no such name."""
        found = NAME.fullmatch(name)
        if found is None or found[1] not in DENSE:
            return None
        return cls(found[1], *map(int, found.groups()[1:8]), tied=found[9] is not None)

    @property
    def name(self) -> str:
        """What `named` reads."""
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        sizes = f"{self.layers}x{self.hidden}-{heads}-{self.intermediate}-{self.vocabulary}"
        return f"{self.family}-{sizes}{'-tied' if self.tied else ''}"

    def options(self) -> dict[str, Any]:
        """The model's configuration in transformers; ValueError on heads that it refuses."""
        if self.family != "qwen3" and self.hidden % self.heads:
            raise ValueError(
                f"model {self.name!r}: transformers wants the hidden size of {self.family} to be a "
                "multiple of the number of query heads; qwen3 is free in this."
            )
        return {
            "model_type": self.family,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": self.tied,
            "sliding_window": None,
        }


def model_config(name: str) -> Any:
    """The configuration of a model of the benches; ValueError on a name of neither kind, and on
    sizes that no canonical order covers."""
    cut = FIRST_LAYERS.fullmatch(name)
    preset, layers = (cut[1], int(cut[2])) if cut else (name, None)
    if preset in known_presets():
        return preset_config(preset, num_layers=layers)
    if sizes := ModelSizes.named(SIZED.get(preset, name)):
        options = sizes.options()
    elif preset in SPARSE_PRESETS:
        options = dict(SPARSE_PRESETS[preset])
    else:
        presets = ", ".join((*known_presets(), *SIZED, *SPARSE_PRESETS))
        raise ValueError(
            f"no model {name!r}; give {presets}, one of these with -4l for its first four layers, "
            "or sizes, such as qwen3-3x1088-20/4x80-3456-50304: family, layers x hidden size, "
            "query heads / key heads x head size, intermediate size, vocabulary, perhaps -tied. "
            f"Families: {', '.join(DENSE)}."
        )
    if layers is not None:
        if not 1 <= layers <= (most := options["num_hidden_layers"]):
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
