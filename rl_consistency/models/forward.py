"""The patched model on packed rows: rollout and training both compute hidden states here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.attention.op import attention_paged
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.token_logprobs.op import lm_head_logits
from rl_consistency.models.decoder import CanonicalBaseModel
from rl_consistency.models.moe import CanonicalMoEBlock
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patched_part
from rl_consistency.numerics.strict import is_canonical


def packed_hidden_states(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Hidden states [R, H] of a batch of R rows after the final norm, differentiable; filler rows
    hold values no sequence depends on."""
    return _decoder(model).batch_forward(batch)


def cache_sizes(model: Any) -> tuple[int, int, int]:
    """Layers, key heads and head size of a cache of the model's keys or values."""
    config = model.config
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


@torch.no_grad()
def attend_to_anything(model: Any, paged: PagedAttention) -> None:
    """Launch the attention of a paged call alone, once for each window that layers have; queries
    and keys hold anything, and nothing is written to the cache."""
    if not is_canonical("attention"):
        return
    kinds = {layer.self_attn.window: layer.self_attn for layer in _decoder(model).layers}
    (rows,), (_, _, *kv) = paged.slot_mapping.shape, paged.key_cache[0].shape
    q = paged.key_cache[0].new_empty((rows, model.config.num_attention_heads, kv[1]))
    k, v = q.new_empty((2, rows, *kv))
    for window, attention in kinds.items():
        attention_paged(q, paged, 0, scale=attention.scaling, window=window, new=(k, v))


def layer_parameters(model: nn.Module) -> int:
    """Parameters that a row meets in the largest decoder layer: of experts, those of its own."""
    most = 0
    for layer in _decoder(model).layers:
        found = sum(parameter.numel() for parameter in layer.parameters())
        if isinstance(block := layer.mlp, CanonicalMoEBlock):
            experts = sum(parameter.numel() for parameter in block.experts.parameters())
            found -= experts - experts * block.gate.top_k // block.gate.weight.shape[0]
        most = max(most, found)
    return most


def check_forward(model: nn.Module, batch: PackedBatch) -> None:
    """What `packed_hidden_states` checks, for a caller that computes the batch in another way."""
    decoder = _decoder(model)
    batch.require_vocabulary(decoder.embed_tokens.num_embeddings)
    decoder.guard()


@torch.no_grad()
def paged_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    paged: PagedAttention,
    rows: Tensor | None = None,
) -> Tensor:
    """Hidden states [T, H] of new tokens whose past lies in a paged cache, where their keys and
    values are written; without a gradient.

    input_ids and position_ids (counted from each sequence's first token) are [T] int64. With `rows`
    [n] int64 the hidden states of these tokens, [n, H]: the same bytes, and less work.
    """
    return _decoder(model).packed_forward(input_ids, position_ids, paged, rows)


@torch.no_grad()
def next_token_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [n, V] fp32 that the next tokens are drawn from, of hidden states [n, H].

    On the stock path of `token_logprobs` they are rounded to the model dtype first.
    """
    weight = lm_head_weight(model)
    if is_canonical("token_logprobs"):
        return lm_head_logits(hidden, weight)
    return F.linear(hidden, weight).float()


def rotary_rows(model: nn.Module, num_positions: int) -> Tensor:
    """The model's table of cosines and sines, [2, rows >= num_positions, D/2] fp32, made now.

    A later call of the model on longer sequences replaces the table. A caller that reads it by
    address, as a CUDA graph does, has to keep this tensor.
    """
    rotary: Any = _decoder(model).rotary_emb
    return rotary.table(num_positions, lm_head_weight(model).device)


def lm_head_weight(model: nn.Module) -> nn.Parameter:
    """The LM head's weight, [V, H]."""
    return patched_part(model, "lm_head").weight


def lm_head_gradient(model: nn.Module) -> GradientBuffer | None:
    """The buffer that the LM head's gradient is folded into."""
    return patched_part(model, "lm_head").gradient_buffer("weight")


def _decoder(model: nn.Module) -> CanonicalBaseModel:
    return patched_part(model, "model")
