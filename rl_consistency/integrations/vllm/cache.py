"""Keys and values in vLLM's memory: what vLLM allocates for a layer, and how the ops see it."""

# pyright: reportMissingImports=false

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rl_consistency.integrations.vllm.steps import Step


def keys_and_values(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views [blocks, block_size, Hkv, D] each of vLLM's memory for one layer: [blocks, block_size,
    2 Hkv, D], or since 0.31 [blocks, Hkv, block_size, 2 D], tokens before heads in memory."""
    if kv_cache.shape[-1] == head_dim:
        keys, values = kv_cache.chunk(2, dim=2)
    else:
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=3)
    return keys, values


def empty_block(block_size: int, kv_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """One block of zeros, laid out as the installed vLLM lays out many."""
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        return like.new_zeros(1, block_size, 2 * kv_heads, head_dim)
    return like.new_zeros(1, block_size, kv_heads, 2 * head_dim).transpose(1, 2)


class CacheLayer(AttentionLayerBase):
    """One layer's keys and values, as vLLM's `static_forward_context` holds them by name."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.dtype, self.kv_cache = dtype, torch.empty(0, 0, 2 * kv_heads, head_dim)

    @property
    def kv_cache(self) -> Tensor:
        """vLLM's memory of this layer; setting it makes the views, and none of an empty one."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: Tensor) -> None:
        self._kv_cache = kv_cache
        if kv_cache.dim() == 4:
            self.keys_and_values = keys_and_values(kv_cache, self.head_dim)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )


class Backend(AttentionBackend):
    """What vLLM asks about the cache; the model calls attention itself."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the member of vLLM's list of backends for those of others

    @staticmethod
    def get_impl_cls() -> Any:
        return None

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        return num_blocks, block_size, 2 * num_kv_heads, head_size

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Layers, then blocks, tokens, heads: the one in which a slot has one distance to the
        next. Asked for since 0.31."""
        return (import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC,)


class MetadataBuilder(AttentionMetadataBuilder):
    """Makes a `Step` of what vLLM knows of one."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        return Step(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        return Step(common_attn_metadata, for_capture=True)
