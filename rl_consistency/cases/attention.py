"""Cases of attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.cases.case import Case, Heads, Setting
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_reference, attention_varlen

SCORE_SCALE = 0.06
"""Factor on probes: softmax weights then span several orders of magnitude, gradients stay in the
range of fp16."""


def attention_cases(setting: Setting) -> Iterator[Case]:
    """One causal sequence, whose rows see each other."""
    yield _case(setting, setting.shapes.attention[0] if setting.real else Heads(4, 2, 64))
    # A GPU's fp32 order errs more than the library where few keys are seen: docs/limits.md.
    if not setting.real and setting.device.type == "cpu":
        yield _case(setting, Heads(4, 2, 64, 48))


def _case(setting: Setting, shape: Heads) -> Case:
    scale, window = shape.scale, shape.window

    def stock(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        places = torch.arange(q.shape[2], device=q.device)
        distance = places[:, None] - places
        mask = None if window is None else (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout = PackedSequences.of([0], [len(q)])
        return attention_varlen(q, k, v, layout, scale=scale, window=window)[0]

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        queries, keys = ((rows, n, shape.head_dim) for n in (shape.heads, shape.kv_heads))
        q, k = (setting.drawn(s, seed + i, SCORE_SCALE) for i, s in enumerate((queries, keys)))
        return q, k, setting.drawn(keys, seed + 2, 0.1)

    def draw_dys(rows: int, seed: int) -> tuple[Tensor, ...]:
        return (setting.drawn((rows, shape.heads, shape.head_dim), seed + 3, 0.1),)

    return Case(
        op="attention",
        size=f"{shape}",
        rows=("q", "k", "v"),
        gradients=("q", "k", "v"),
        outputs=("o",),
        draw=draw,
        draw_dys=draw_dys,
        call=ours,
        stock=stock,
        reference=lambda q, k, v: attention_reference(q, k, v, scale=scale, window=window),
        seeds=(1,),
    )
