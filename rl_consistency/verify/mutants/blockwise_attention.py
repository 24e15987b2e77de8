"""Attention in plain torch whose blocks of keys lie where they should not: for perturbations."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Any,
    scale: float,
    window: int | None,
    *,
    block: int = 64,
    at_padding: bool = False,
) -> tuple[Tensor, Tensor]:
    """Online softmax over blocks of keys, sequence by sequence; differentiable.

    `at_padding` counts the blocks from where left padding to the call's longest sequence begins.
    """
    longest = max(layout.context_lens, default=1)
    key_rows = layout.key_rows(longest).to(q.device)
    outs, stats, rows = [], [], []
    group = q.shape[1] // k.shape[1]
    for i, (start, count, context) in enumerate(
        zip(layout.query_starts, layout.query_lens, layout.context_lens, strict=True)
    ):
        first = (longest - context) % block if at_padding else 0
        own = q[start : start + count].float().transpose(0, 1)  # [H, n, D]
        keys, values = (
            x[key_rows[i, :context]].float().transpose(0, 1).repeat_interleave(group, 0)
            for x in (k, v)
        )
        positions = torch.arange(context - count, context, device=q.device)[:, None]
        m = own.new_full(own.shape[:2], -torch.inf)
        length, acc = torch.zeros_like(m), torch.zeros_like(own)
        edges = [0, *range(block - first, context, block), context]
        for begin, end in itertools.pairwise(edges):
            distance = positions - torch.arange(begin, end, device=q.device)
            visible = (distance >= 0) & (distance < (window or context + 1))
            scores = own @ keys[:, begin:end].transpose(1, 2) * scale
            scores = scores.masked_fill(~visible, -torch.inf)
            new_m = torch.maximum(m, scores.detach().amax(-1))
            shift = new_m.masked_fill(new_m == -torch.inf, 0.0)
            p = torch.exp(scores - shift[..., None])
            rescale = torch.exp(m - shift)
            length = length * rescale + p.sum(-1)
            acc = acc * rescale[..., None] + p @ values[:, begin:end]
            m = new_m
        outs.append((acc / length[..., None]).transpose(0, 1).to(q.dtype))
        stats.append((m + torch.log(length)).t().detach())
        rows.append(torch.arange(start, start + count, device=q.device))
    index = torch.cat(rows)
    out = torch.zeros_like(q).index_copy(0, index, torch.cat(outs))
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    return out, lse.index_copy(0, index, torch.cat(stats))
