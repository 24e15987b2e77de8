"""What ops that are not strict compute in place of ours: stock attention and log-probabilities.

Attention is torch's scaled_dot_product_attention. Sequences are computed one by one; those of a
CUDA graph, whose lengths only the device knows, in one batch with a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout, CapturedPagedAttention
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits


def stock_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """Attention in the order torch chooses; for ablations and negative controls.

    q: [T, H, D]. k and v: [rows, Hkv, D] packed, or the flattened cache. scale: factor on the
    scores. window: sliding window, or None. Returns [T, H, D]; rows that no sequence owns are 0.
    """
    out = torch.zeros_like(q)
    key_rows = layout.key_rows_on(q.device)
    spans = zip(layout.query_starts, layout.query_lens, layout.context_lens, strict=True)
    for i, (start, queries, context) in enumerate(spans):
        index = key_rows[i, :context]
        position = torch.arange(context - queries, context, device=q.device)[:, None]
        distance = position - torch.arange(context, device=q.device)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        attended = F.scaled_dot_product_attention(
            q[start : start + queries].transpose(0, 1),
            k[index].transpose(0, 1),
            v[index].transpose(0, 1),
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        out[start : start + queries] = attended.transpose(0, 1)
    return out


def stock_captured_attention(
    q: Tensor, layout: CapturedPagedAttention, layer: int, *, scale: float, window: int | None
) -> Tensor:
    """Attention of a captured layout, its keys gathered up to the longest context it allows.

    q: [T, H, D], the same number of queries for each sequence. layer: which cache to read. Returns
    [T, H, D]; rows after a sequence's last query hold nothing of use.
    """
    numbers, sequences = layout.numbers, len(layout.query_lens)
    queries = q.shape[0] // sequences
    blocks = -(-max(layout.context_lens) // layout.block_size)
    keys = blocks * layout.block_size
    key = torch.arange(keys, device=q.device)
    starts = numbers.block_table[:, :blocks, None] * layout.block_size
    places = (starts + key[: layout.block_size]).flatten(1)  # [B, keys]
    # Places after a sequence's last key read its first key instead: an earlier sequence may have
    # left NaN there, which a weight of 0 would not remove.
    index = torch.where(key < numbers.context_len[:, None], places, places[:, :1]).view(-1)
    caches = (layout.key_cache[layer].flatten(0, 1), layout.value_cache[layer].flatten(0, 1))
    k, v = (rows.index_select(0, index).unflatten(0, (sequences, keys)) for rows in caches)
    kv_heads, heads, head_dim = k.shape[2], q.shape[1], q.shape[2]
    last = numbers.context_len - 1
    token = torch.arange(queries, device=q.device)
    position = torch.minimum((last + 1 - numbers.query_len)[:, None] + token, last[:, None])
    distance = position[:, :, None] - key  # [B, queries, keys]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    # The heads of a KV group become further queries: no kernel with a mask takes grouped heads, and
    # torch would copy the keys for each of them.
    group = heads // kv_heads
    grouped = q.view(sequences, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    attended = F.scaled_dot_product_attention(
        grouped.flatten(2, 3),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible.repeat(1, group, 1)[:, None],
        scale=scale,
    )
    return attended.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).reshape(q.shape)


def stock_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows
) -> tuple[Tensor, Tensor]:
    """Logits in the model dtype and their logsumexp in fp32: what an unpatched trainer computes."""
    logits = F.linear(hidden, weight).float()
    if rows.truncates:
        support = distribution(lm_head_logits(hidden, weight).detach(), rows).scaled
        logits = logits.masked_fill(support == -torch.inf, -torch.inf)
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0).unsqueeze(1)
    logits = logits / temperature
    logprobs = logits - logits.logsumexp(dim=1, keepdim=True)
    safe = targets.masked_fill(targets == IGNORED, 0)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(dim=1)
    return logprobs.gather(1, safe.unsqueeze(1)).squeeze(1), entropy


def selective_log_softmax(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logprobs [n] fp32 of one token for each row of logits [n, V]: its logit less the logsumexp.

    So does TRL's function of this name. torch's log_softmax has a bias on a CPU, of up to 2e-5
    where the vocabulary is large.
    """
    logits = logits.float()
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)
