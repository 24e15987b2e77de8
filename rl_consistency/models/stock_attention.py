"""The stock path of attention over our layouts: torch's scaled_dot_product_attention, per
sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention_layout import KEY_BLOCK, AttentionLayout


def stock_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention in whatever order torch chooses; for ablations and negative controls.

    Args:
        q: [T, H, D].
        k: [rows, Hkv, D] packed, or the flattened cache.
        v: like k.
        layout: where queries and keys lie.
        scale: factor on the scores.
        window: sliding window, or None.

    Returns:
        [T, H, D]; rows that no sequence owns are 0.
    """
    out = torch.zeros_like(q)
    longest = max(layout.context_lens, default=0)
    key_rows = layout.key_rows(-(-max(longest, 1) // KEY_BLOCK) * KEY_BLOCK)
    spans = zip(layout.query_starts, layout.query_lens, layout.context_lens, strict=True)
    for i, (start, queries, context) in enumerate(spans):
        index = key_rows[i, :context].to(q.device)
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
