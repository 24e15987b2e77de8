"""The sections `policy` and `tokenizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rl_consistency.trainers.config.section import (
    Count,
    Int,
    LocalPath,
    Name,
    Positive,
    Section,
    require_one,
)

SPARSE = ("qwen3_moe", "olmoe", "mixtral")
"""Families whose layers are mixtures of experts."""
HEAD_STEP, WIDEST_HEAD = 16, 256
"""Widths of heads that attention takes."""


class ExpertsSection(Section):
    """What a mixture of experts has and a dense model has not."""

    count: Count
    """Experts of each layer, all of width intermediate_size."""
    per_token: Count
    """Experts that a token meets in each layer."""

    @model_validator(mode="after")
    def _fits(self) -> ExpertsSection:
        if self.per_token > self.count:
            raise ValueError(f"per_token {self.per_token} is more than the {self.count} experts")
        return self


class BuildSection(Section):
    """A policy built from scratch; its vocabulary is the tokenizer's, padded to 16s."""

    architecture: Literal["qwen3", "llama", "mistral", "qwen2", "qwen3_moe", "olmoe", "mixtral"]
    """Family of the Hugging Face causal language model."""
    hidden_size: Count
    """Width of the residual stream."""
    intermediate_size: Count
    """Width of the gated MLP, of each expert's in a mixture of experts."""
    num_hidden_layers: Count
    """Number of decoder layers."""
    num_attention_heads: Count
    """Number of query heads."""
    num_key_value_heads: Count
    """Number of key/value heads; divides num_attention_heads."""
    head_dim: Annotated[Int, Field(ge=HEAD_STEP, le=WIDEST_HEAD, multiple_of=HEAD_STEP)] | None = (
        None
    )
    """Width of one head, a multiple of 16 up to 256; null = hidden_size / num_attention_heads."""
    max_position_embeddings: Count = 512
    """Longest sequence, prompt and completion together, in tokens."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Use the input embedding as the LM head."""
    experts: ExpertsSection | None = None
    """Experts of qwen3_moe, olmoe and mixtral; null in the dense families."""

    @model_validator(mode="after")
    def _heads_fit(self) -> BuildSection:
        heads, shared, size = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        if heads % shared:
            raise ValueError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {shared}"
            )
        if self.head_dim is None and (size % (HEAD_STEP * heads) or size > WIDEST_HEAD * heads):
            raise ValueError(
                f"hidden_size {size} gives {heads} heads no width that is a multiple of "
                f"{HEAD_STEP} up to {WIDEST_HEAD}: set head_dim"
            )
        if self.architecture == "olmoe" and self.head_dim not in (None, size // heads):
            raise ValueError("olmoe norms whole projections: leave head_dim out")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> BuildSection:
        if (self.experts is not None) != (self.architecture in SPARSE):
            wanted = "set experts" if self.experts is None else "leave experts out"
            raise ValueError(f"architecture {self.architecture}: {wanted}")
        return self


class PolicySection(Section):
    """The model that is trained: exactly one of `path`, `hub` and `build`."""

    path: LocalPath | None = None
    """Local Hugging Face model directory (config.json, safetensors); nothing is downloaded."""
    hub: Name | None = None
    """Model name on the Hugging Face hub; the only setting that may download anything."""
    build: BuildSection | None = None
    """Sizes of a policy with fresh weights drawn from run.seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters and activations; accumulation is always float32. float16 cannot be
    trained: per-token gradients underflow without a loss scale."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; changes memory and time, not bits."""

    @model_validator(mode="after")
    def _one_source(self) -> PolicySection:
        require_one(path=self.path, hub=self.hub, build=self.build)
        return self


class TokenizerSection(Section):
    """How text becomes tokens."""

    kind: Literal["byte", "auto"]
    """byte: one token per UTF-8 byte; auto: the tokenizer of policy.path or policy.hub."""
