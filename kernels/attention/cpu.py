"""The attention order on a CPU: forward by tiles of 16 rows, backward by tiles of 64 queries.

Keys are gathered for every tile; tiles or sequences are batched up to `GATHER_BYTES`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    KEY_BLOCK,
    AttentionLayout,
    PackedSequences,
    TilePlan,
)
from rl_consistency.kernels.matmul.op import tile_matmul
from rl_consistency.kernels.reduction.sums import tree_sum

GATHER_BYTES = 64 << 20
"""The most bytes of fp32 keys gathered at a time; no bit depends on it."""


def attention_cpu_fwd(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] and lse [T, H]; rows that no sequence owns are 0 and -inf."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    plan = layout.plan(group, window)
    # [T, Hkv, group, D] -> [T * group, Hkv, D]: one row per position and head of a KV group.
    queries = (
        q.view(rows, kv_heads, group, head_dim).transpose(1, 2).reshape(-1, kv_heads, head_dim)
    )
    out = q.new_zeros(rows * group, kv_heads, head_dim)
    lse = torch.full((rows * group, kv_heads), -math.inf, dtype=torch.float32)
    per_tile = 2 * KEY_BLOCK * kv_heads * head_dim * 4
    for tiles in torch.arange(len(plan.sequence)).split(max(1, GATHER_BYTES // per_tile)):
        values, statistics = _fold_tiles(queries, k, v, plan, tiles, scale, window)
        owned = plan.query_positions[tiles].flatten() >= 0
        targets = plan.query_rows[tiles].flatten()[owned]
        # [tiles, Hkv, 16, ...] -> [tiles * 16, Hkv, ...]
        out[targets] = values.transpose(1, 2).flatten(0, 1)[owned].to(q.dtype)
        lse[targets] = statistics.transpose(1, 2).flatten(0, 1)[owned]
    out = out.view(rows, group, kv_heads, head_dim).transpose(1, 2).reshape(rows, heads, head_dim)
    return out, lse.view(rows, group, kv_heads).transpose(1, 2).reshape(rows, heads)


def _fold_tiles(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, tiles: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs [tiles, Hkv, 16, D] and lse [tiles, Hkv, 16] of some tiles, both fp32."""
    # [tiles, 16, Hkv, D] -> [tiles, Hkv, 16, D]
    q = q[plan.query_rows[tiles]].transpose(1, 2).float().contiguous()
    positions = plan.query_positions[tiles]
    first, last = plan.first_block[tiles], plan.last_block[tiles]
    m = q.new_full(q.shape[:-1], -math.inf)
    length = torch.zeros_like(m)
    acc = torch.zeros_like(q)
    blocks = range(int(first.min()), int(last.max()) + 1) if len(tiles) else ()
    for block in blocks:
        index = torch.nonzero((first <= block) & (block <= last)).flatten()
        if len(index) == 0:
            continue
        span = slice(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        key_rows = plan.key_rows[plan.sequence[tiles[index]], span]
        seen = visible(positions[index], torch.arange(span.start, span.stop), window)
        state = m[index], length[index], acc[index]
        state = _fold_block(q[index], k[key_rows], v[key_rows], seen, state, scale)
        m[index], length[index], acc[index] = state
    empty = length == 0
    out = acc / length.masked_fill(empty, 1.0).unsqueeze(-1) + 0.0
    return out, m + torch.log(length)


def _fold_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, length, acc) after one more block of keys: q and acc [n, Hkv, 16, D], k and v
    [n, 64, Hkv, D], seen [n, 16, 64], m and length [n, Hkv, 16]."""
    m, length, acc = state
    n, kv_heads, _, _ = q.shape
    dtype = v.dtype
    # [n, 64, Hkv, D] -> [n * Hkv, 64, D]
    k, v = (x.transpose(1, 2).float().contiguous().flatten(0, 1) for x in (k, v))
    scores = tile_matmul(q.flatten(0, 1), k.transpose(1, 2)) * scale
    scores = scores.unflatten(0, (n, kv_heads)).masked_fill(~seen[:, None], -math.inf)
    new_m = torch.maximum(m, scores.amax(dim=-1))
    # A row that has seen no key yet keeps m = -inf; subtracting it would give NaN.
    shift = new_m.masked_fill(new_m == -math.inf, 0.0)
    rescale = torch.exp(m - shift)
    p = torch.exp(scores - shift.unsqueeze(-1)).to(dtype).float()
    product = tile_matmul(p.flatten(0, 1), v)
    length = length * rescale + tree_sum(p)
    acc = acc * rescale.unsqueeze(-1) + product.view_as(acc)
    return new_m, length, acc


def visible(positions: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[..., rows, keys] bool: whether a key lies in the window that ends at the query."""
    distance = positions.unsqueeze(-1) - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attention_cpu_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PackedSequences,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), 0 in rows that no sequence owns; sequences of equal block count are batched."""
    delta = tree_sum(do.float() * out.float())
    gradients = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    lens = torch.tensor(list(layout.query_lens), dtype=torch.int64)
    starts = torch.tensor(list(layout.query_starts), dtype=torch.int64)
    blocks = -(-lens // KEY_BLOCK)
    for count in blocks[blocks > 0].unique().tolist():
        positions = torch.arange(count * KEY_BLOCK)
        per_sequence = len(positions) * q.shape[1] * q.shape[2] * 4 * 8
        members = torch.nonzero(blocks == count).flatten()
        for chosen in members.split(max(1, GATHER_BYTES // per_sequence)):
            own_lens = lens[chosen][:, None]
            valid = positions < own_lens
            rows = starts[chosen][:, None] + torch.minimum(positions, own_lens - 1)
            parts = _backward_sequences(
                [t[rows] for t in (do, q, k, v)], lse[rows], delta[rows], valid, scale, window
            )
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[rows[valid]] = part[valid].to(gradient.dtype)
    return gradients


def _backward_sequences(
    operands: list[Tensor],
    lse: Tensor,
    delta: Tensor,
    valid: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of n sequences of equal block count, shaped as the operands [n, S, heads, D]."""
    n, length, heads, head_dim = operands[1].shape
    kv_heads = operands[2].shape[2]
    group = heads // kv_heads
    dtype = operands[1].dtype
    blocks = length // KEY_BLOCK

    def per_head(x: Tensor) -> Tensor:
        """[n, S, heads, D] -> [blocks, n * H, 64, D] fp32, KV heads repeated, filler rows zero."""
        x = x.float() * valid[:, :, None, None]
        x = x.view(n, blocks, KEY_BLOCK, x.shape[2], head_dim).permute(1, 0, 3, 2, 4)
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
        return x.reshape(blocks, n * heads, KEY_BLOCK, head_dim)

    def per_row(x: Tensor) -> Tensor:
        """[n, S, H] -> [blocks, n * H, 64, 1]."""
        x = x.view(n, blocks, KEY_BLOCK, heads).permute(1, 0, 3, 2)
        return x.reshape(blocks, n * heads, KEY_BLOCK, 1)

    def over_group(x: Tensor) -> Tensor:
        """[n * H, 64, D] -> [n * Hkv, 64, D], the group's heads added upward."""
        members = x.view(n * kv_heads, group, KEY_BLOCK, head_dim).unbind(1)
        total = members[0]
        for member in members[1:]:
            total = total + member
        return total

    do, q, k, v = (per_head(x) for x in operands)
    lse, delta = per_row(lse), per_row(delta)
    owned = valid.view(n, blocks, KEY_BLOCK).permute(1, 0, 2).repeat_interleave(heads, dim=1)
    dq = torch.zeros_like(q)
    dk = q.new_zeros(blocks, n * kv_heads, KEY_BLOCK, head_dim)
    dv = torch.zeros_like(dk)
    span = torch.arange(KEY_BLOCK)
    for i in range(blocks):
        rows = span + i * KEY_BLOCK
        first = 0 if window is None else max(i * KEY_BLOCK - window + 1, 0) // KEY_BLOCK
        for j in range(first, i + 1):
            seen = visible(rows, span + j * KEY_BLOCK, window) & owned[i].unsqueeze(-1)
            scores = tile_matmul(q[i], k[j].transpose(1, 2)) * scale
            p = torch.exp((scores - lse[i]).masked_fill(~seen, -math.inf))
            ds = p * (tile_matmul(do[i], v[j].transpose(1, 2)) - delta[i])
            p, ds = p.to(dtype).float(), ds.to(dtype).float()
            dq[i] += tile_matmul(ds, k[j])
            dk[j] += over_group(tile_matmul(ds.transpose(1, 2), q[i]))
            dv[j] += over_group(tile_matmul(p.transpose(1, 2), do[i]))

    def packed(x: Tensor, heads: int, factor: float) -> Tensor:
        x = x.view(blocks, n, heads, KEY_BLOCK, head_dim).permute(1, 0, 3, 2, 4)
        return x.reshape(n, length, heads, head_dim) * factor + 0.0

    return packed(dq, heads, scale), packed(dk, kv_heads, scale), packed(dv, kv_heads, 1.0)
