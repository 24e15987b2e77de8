"""The models of the benches by name: presets, and dense models whose name says their sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from rl_consistency.models.families import FAMILIES, check_config
from rl_consistency.verify.presets import build_lifelike, known_presets, preset_config

NAME = re.compile(r"([a-z0-9]+)-(\d+)x(\d+)-(\d+)/(\d+)x(\d+)-(\d+)-(\d+)(-tied)?")
MAX_POSITIONS = 32768


@dataclass(frozen=True)
class ModelSizes:
    """A dense model; `qwen3-3x1088-20/4x80-3456-50304-tied` is the name of one."""

    family: str
    """A model_type of `FAMILIES`."""
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
        if found is None or found[1] not in FAMILIES:
            return None
        return cls(found[1], *map(int, found.groups()[1:8]), tied=found[9] is not None)

    @property
    def name(self) -> str:
        """What `named` reads."""
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        sizes = f"{self.layers}x{self.hidden}-{heads}-{self.intermediate}-{self.vocabulary}"
        return f"{self.family}-{sizes}{'-tied' if self.tied else ''}"

    def config(self) -> PreTrainedConfig:
        """As transformers has it; ValueError on heads that it refuses."""
        if self.family != "qwen3" and self.hidden % self.heads:
            raise ValueError(
                f"model {self.name!r}: transformers wants the hidden size of {self.family} to be a "
                "multiple of the number of query heads; qwen3 is free in this."
            )
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=self.tied,
            sliding_window=None,
        )


def model_config(name: str) -> Any:
    """The configuration of a model of the benches; ValueError on a name of neither kind, and on
    sizes that no canonical order covers."""
    if sizes := ModelSizes.named(name):
        check_config(config := sizes.config())
        return config
    if name in known_presets():
        return preset_config(name)
    raise ValueError(
        f"no model {name!r}; give {', '.join(known_presets())} or sizes, such as "
        "qwen3-3x1088-20/4x80-3456-50304: family, layers x hidden size, query heads / key heads x "
        f"head size, intermediate size, vocabulary, perhaps -tied. Families: {', '.join(FAMILIES)}."
    )


def build_model(name: str, device: torch.device) -> nn.Module:
    """A model of the benches in bf16, with random weights, in evaluation mode."""
    return build_lifelike(model_config(name), torch.bfloat16, device=device)
