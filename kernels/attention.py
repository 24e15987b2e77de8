"""o = softmax(scale * q k^T + mask) v, causal, per sequence, as a fold over blocks of keys.

Shapes: q [T, H, D], k and v [T, Hkv, D] (packed) or [num_blocks, block_size, Hkv, D] (paged); H a
    multiple of Hkv (GQA), D a multiple of 16 up to 256 -> o [T, H, D], lse [T, H] fp32 (natural
    log).
Dtypes and rounding points: fp32, bf16, fp16; scores, statistics and accumulators fp32;
    probabilities rounded to the dtype of v before they are multiplied with v (on a CPU before they
    are summed, too); o rounded once. Backward: probabilities and score gradients rounded to the
    dtype before their products.
Order: `ORDER` below.
Invariant to: the other sequences, the number of queries in the call (prefill, chunk, decode), the
    placement of keys, the block size of the cache, tiles of queries, rows no sequence owns (they
    give 0). Backward on CUDA expects finite neighbours: a NaN in another sequence may spread.
Varies with: D, the window, and the key's distance from its sequence's start (block borders).
Backward: dq, dk, dv without atomics; packed layout only. lse has no gradient.
Errors: TypeError on dtypes, ValueError on shapes, devices, layout and autocast.
Cost: on the CPU two batched products per block of 64 keys; keys are gathered per tile. On CUDA see
    benchmarks/results/h200.json.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao et al.,
    FlashAttention (2022).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_consistency.kernels.attention_backward_triton import attention_bwd
from rl_consistency.kernels.attention_layout import (
    KEY_BLOCK,
    ROW_TILE,
    AttentionLayout,
    PackedSequences,
    PagedAttention,
    TilePlan,
)
from rl_consistency.kernels.attention_schedules import lse_dtype
from rl_consistency.kernels.attention_triton import attention_fwd
from rl_consistency.kernels.library import kernel_op
from rl_consistency.kernels.matmul import tile_matmul
from rl_consistency.kernels.operand import require_operands
from rl_consistency.kernels.recording import apply, plain
from rl_consistency.kernels.reduction_order import ReductionOrder
from rl_consistency.kernels.row_reduction import tree_sum

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16
GATHER_BYTES = 64 << 20
"""Upper bound on the fp32 keys gathered at a time; neutral to the bits."""

ORDER = ReductionOrder(
    id="attention",
    version=3,
    text=(
        "On a CPU: keys in blocks of 64 counted from the sequence's first token. Per block: s = "
        "(q.k in the matmul order over D) * scale; m' = max(m, max s); a = exp(m - m'); p = exp(s"
        " - m') rounded to the dtype of v; l = l*a + tree(p); acc = acc*a + (p.v in the matmul "
        "order over the block). o = acc/l, lse = m + log(l). Backward in tiles of 64 queries by "
        "64 keys, both counted from the sequence's start: p = exp(s - lse), ds = p*(dp - "
        "tree(do*o)), both rounded to the dtype; dq folds over key tiles upward; dk and dv fold "
        "over query tiles upward, in each first over the group's heads upward. On CUDA: blocks of"
        " 128 keys (64 where D > 128), s.c with c = scale*log2(e). Each block on its own: m_b = "
        "max(s)*c, p = exp2(fma(s, c, -m_b)), l_b = p halved to eight lanes, acc_b = p rounded to"
        " the dtype times v in matrix steps from zero. The left fold over blocks: m' = max(m, "
        "m_b), a = exp2(m - m'), b = exp2(m_b - m'), l = fma(l_b, b, l*a), acc = fma(acc_b, b, "
        "acc*a). o = acc*(1/tree(l)), lse = (m + log2 tree(l))*ln 2. Backward: p = exp2(fma(s, c,"
        " -lse*log2(e))), ds = p*(dp - tree(do*o)), both rounded; dq one chain of matrix steps "
        "over keys upward, dk and dv one over the group's heads, then queries, upward; times "
        "scale. fp32: lse is kept in fp64, and a step of dq sums 32 keys, one of dk and dv 32 "
        "queries, from zero, into fp64. Negative zero becomes positive zero."
    ),
)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedSequences,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal self-attention over packed sequences, differentiable in q, k and v.

    Args:
        q: [T, H, D].
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        layout: where each sequence lies among the T rows.
        scale: factor on the scores.
        window: each query sees itself and the `window - 1` tokens before it; None sees all.

    Returns:
        (o [T, H, D], lse [T, H] fp32).
    """
    _check(q, k, v, layout, scale, window)
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"attention: q has {q.shape[0]} rows but k has {k.shape[0]}; packed keys stand in the "
            "rows of their queries."
        )
    return apply(_Attention, q, k, v, layout, scale, window)


@torch.no_grad()
def attention_paged(
    q: Tensor,
    paged: PagedAttention,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same attention with keys and values read from a layer's paged cache.

    Args:
        q: [T, H, D] queries of the new tokens, whose keys have been written already.
        paged: the call's layout and caches.
        layer: which cache to read.
        scale: factor on the scores.
        window: as in `attention_varlen`.

    Returns:
        (o [T, H, D], lse [T, H] fp32), without gradient.
    """
    k, v = (
        cache.view(-1, *cache.shape[2:])
        for cache in (paged.key_cache[layer], paged.value_cache[layer])
    )
    _check(q, k, v, paged, scale, window)
    out, lse = _forward(q, k, v, paged, scale, window)
    return out, lse.float()


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
) -> None:
    require_operands("attention", q=q, k=k, v=v)
    heads, head_dim = q.shape[-2:]
    if k.shape != v.shape or k.shape[-1] != head_dim or heads % k.shape[-2]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; k and v are "
            "alike, head_dim is shared, and query heads are a multiple of key heads."
        )
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"attention: head_dim {head_dim}; allowed: multiples of 16 up to {MAX_HEAD_DIM}."
        )
    if scale <= 0:
        raise ValueError(f"attention: scale {scale}; it must be positive.")
    if window is not None and window < 1:
        raise ValueError(
            f"attention: window {window}; it must be at least 1, or None for no window."
        )
    ends = [s + n for s, n in zip(layout.query_starts, layout.query_lens, strict=True)]
    if max(ends, default=0) > q.shape[0]:
        raise ValueError(
            f"attention: the layout reaches row {max(ends)} but q has {q.shape[0]} rows."
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout, scale, window):
        out, lse = _forward(q, k, v, layout, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        lse = lse.float()
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(
            grad_outputs[0], q, k, v, out, lse, ctx.layout, ctx.scale, ctx.window
        )
        return dq, dk, dv, None, None, None


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    lens: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))


@kernel_op(fake=_fake_fwd)
def attention_packed_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    lens: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """`attention_varlen` on CUDA for a compiler: the layout as two lists."""
    return attention_fwd(q, k, v, PackedSequences.of(starts, lens), scale, window)


def _fake_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: list[int],
    lens: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@kernel_op(fake=_fake_bwd)
def attention_packed_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: list[int],
    lens: list[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    layout = PackedSequences.of(starts, lens)
    return attention_bwd(do, q, k, v, out, lse, layout, scale, window)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        seen = torch.compiler.is_compiling() or not plain((q, k, v))
        if seen and isinstance(layout, PackedSequences):
            return attention_packed_fwd(
                q, k, v, list(layout.query_starts), list(layout.query_lens), scale, window
            )
        return attention_fwd(q, k, v, layout, scale, window)
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    plan = layout.plan(group, window)
    # [T, Hkv, group, D] -> [T * group, Hkv, D]: one row per position and head of a KV group.
    queries = (
        q.view(rows, kv_heads, group, head_dim).transpose(1, 2).reshape(-1, kv_heads, head_dim)
    )
    out = q.new_zeros(rows * group, kv_heads, head_dim)
    lse = torch.full((rows * group, kv_heads), -math.inf)
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
    queries: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TilePlan,
    tiles: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [tiles, Hkv, 16, D] and lse [tiles, Hkv, 16] of some tiles, both fp32."""
    # [tiles, 16, Hkv, D] -> [tiles, Hkv, 16, D]
    q = queries[plan.query_rows[tiles]].transpose(1, 2).float().contiguous()
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
        visible = _visible(positions[index], torch.arange(span.start, span.stop), window)
        state = _fold_block(
            q[index], k[key_rows], v[key_rows], visible, m[index], length[index], acc[index], scale
        )
        m[index], length[index], acc[index] = state
    empty = length == 0
    out = acc / length.masked_fill(empty, 1.0).unsqueeze(-1) + 0.0
    return out, m + torch.log(length)


def _fold_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    m: Tensor,
    length: Tensor,
    acc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the fold: q [n, Hkv, 16, D], k and v [n, 64, Hkv, D], visible [n, 16, 64]."""
    n, kv_heads, _, head_dim = q.shape
    dtype = v.dtype
    k = k.transpose(1, 2).float().contiguous().view(n * kv_heads, KEY_BLOCK, head_dim)
    v = v.transpose(1, 2).float().contiguous().view(n * kv_heads, KEY_BLOCK, head_dim)
    scores = tile_matmul(q.view(n * kv_heads, ROW_TILE, head_dim), k.transpose(1, 2)) * scale
    scores = scores.view(n, kv_heads, ROW_TILE, KEY_BLOCK)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    new_m = torch.maximum(m, scores.amax(dim=-1))
    # A row that has seen no key yet keeps m = -inf; subtracting it would give NaN.
    shift = new_m.masked_fill(new_m == -math.inf, 0.0)
    rescale = torch.exp(m - shift)
    p = torch.exp(scores - shift.unsqueeze(-1)).to(dtype).float()
    product = tile_matmul(p.view(n * kv_heads, ROW_TILE, KEY_BLOCK), v)
    length = length * rescale + tree_sum(p)
    acc = acc * rescale.unsqueeze(-1) + product.view_as(acc)
    return new_m, length, acc


def _visible(positions: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[..., rows, keys] bool: key not after the query and not before its window."""
    distance = positions.unsqueeze(-1) - keys
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _backward(
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
    if q.is_cuda:
        if torch.compiler.is_compiling() or not plain((do, q, k, v)):
            return attention_packed_bwd(
                do, q, k, v, out, lse, list(layout.query_starts), list(layout.query_lens), scale,
                window,
            )  # fmt: skip
        return attention_bwd(do, q, k, v, out, lse, layout, scale, window)
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
    """Gradients of n sequences of equal block count; operands [n, S, heads, D], result the same."""
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
            visible = _visible(rows, span + j * KEY_BLOCK, window) & owned[i].unsqueeze(-1)
            scores = tile_matmul(q[i], k[j].transpose(1, 2)) * scale
            p = torch.exp((scores - lse[i]).masked_fill(~visible, -math.inf))
            ds = p * (tile_matmul(do[i], v[j].transpose(1, 2)) - delta[i])
            p, ds = p.to(dtype).float(), ds.to(dtype).float()
            dq[i] += tile_matmul(ds, k[j])
            dk[j] += over_group(tile_matmul(ds.transpose(1, 2), q[i]))
            dv[j] += over_group(tile_matmul(p.transpose(1, 2), do[i]))

    def packed(x: Tensor, heads: int, factor: float) -> Tensor:
        x = x.view(blocks, n, heads, KEY_BLOCK, head_dim).permute(1, 0, 3, 2, 4)
        return x.reshape(n, length, heads, head_dim) * factor + 0.0

    return packed(dq, heads, scale), packed(dk, kv_heads, scale), packed(dv, kv_heads, 1.0)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """One sequence, q [T, H, D], k and v [T, Hkv, D], in fp64; for accuracy tests only."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    positions = torch.arange(q.shape[1], device=q.device)
    scores = (q @ k.transpose(1, 2)) * scale
    scores = scores.masked_fill(~_visible(positions, positions, window), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)
