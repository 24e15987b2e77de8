"""Triton schedules of the backward attention order: dq by query tiles, dk and dv by key tiles.

Every gradient is one chain of matrix steps, so that tiles are free; nothing is added by atomics.
Scores are computed twice, once for dq and once for dk and dv: seven products where
`attention_backward_hopper`, which hands chains of dq from tile to tile, needs five.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.hopper import backward as attention_backward_hopper
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FIVE_PRODUCTS,
    LOG2E,
    NO_WINDOW,
    UNSPECIALIZED,
    Schedule,
    admits,
    dense,
    describable,
    in_five_products,
    pick_backward,
    sources,
)
from rl_consistency.kernels.attention.tiles_triton import load_rows, rows_of, visible
from rl_consistency.kernels.core.matrix_step import matrix_step, no_steps
from rl_consistency.kernels.reduction.tree_fold_triton import tree_fold

LOG2E_VALUE = tl.constexpr(LOG2E)


@triton.jit(do_not_specialize=["num_rows"])
def attention_delta_kernel(
    dO, OUT, DELTA, num_rows, stride_dot, stride_doh, stride_ot, stride_oh, HEADS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """delta = tree(do * o) for every query and head."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    dim = tl.arange(0, DIM)
    mask = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    do = tl.load(
        dO + token[:, None] * stride_dot + head[:, None] * stride_doh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    o = tl.load(
        OUT + token[:, None] * stride_ot + head[:, None] * stride_oh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    product = do.to(tl.float32) * o.to(tl.float32)
    tl.store(DELTA + row, tree_fold(product, ROWS, DIM), mask=row < num_rows)


@triton.jit
def _log2_parts(lse):
    """The log-sum-exp in log2 units as a large and a small fp32 part; an fp32 one has no second."""
    wide = lse * LOG2E_VALUE
    large = wide.to(tl.float32)
    rest = tl.zeros_like(large)
    if lse.dtype == tl.float64:
        # An infinite one, of a query past the end, leaves no rest.
        rest = tl.where(tl.abs(large) == float("inf"), 0.0, wide - large.to(tl.float64))
        rest = rest.to(tl.float32)
    return large, rest


@triton.jit
def _fold_dq(
    q, do, lse, rest, delta, position, low, high,
    K, V, k_descriptor, v_descriptor, row0, kv_head, limit, window, factor,
    stride_kt, stride_kh, stride_vt, stride_vh, dq,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, KEYS):
        k = load_rows(K, k_descriptor, K, start, row0, kv_head, limit, stride_kt, stride_kh, 1,
                       KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        v = load_rows(V, v_descriptor, V, start, row0, kv_head, limit, stride_vt, stride_vh, 1,
                       KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2(tl.fma(scores, factor, -lse[:, None]) - rest[:, None])
        if MASKED:
            key = start + tl.arange(0, KEYS)
            p = tl.where(visible(position[:, None], key[None, :], window), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = matrix_step(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["tiles", "query_start", "query_len", "window"])
def attention_dq_kernel(
    dO, Q, K, V, k_descriptor, v_descriptor, LSE, DELTA, dQ, tiles, query_start, query_len,
    window, factor, scale,
    stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dqt, stride_dqh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows: a matrix-step fold over keys upward."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    limit = tl.load(query_len + sequence)
    start_row = tl.load(query_start + sequence)
    valid, token, head, position = rows_of(first_row, kv_head, limit, 0, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    dim = tl.arange(0, DIM)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        Q + token_row[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    do = tl.load(
        dO + token_row[:, None] * stride_dot + head[:, None] * stride_doh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    lse = tl.load(LSE + token_row * stride_lse + head, mask=valid, other=0.0)
    lse, rest = _log2_parts(lse)
    delta = tl.load(DELTA + token_row * stride_lse + head, mask=valid, other=0.0)
    first_position = first_row // GROUP
    last_position = tl.minimum((first_row + ROWS - 1) // GROUP, limit - 1)
    high = last_position + 1
    low = 0
    dq = no_steps(ROWS, DIM, Q.dtype.element_ty)
    full_high = (first_position + 1) // KEYS * KEYS
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
        edge = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS
        full_low = tl.minimum(tl.maximum(edge, low), tl.maximum(full_high, low))
        dq = _fold_dq(
            q, do, lse, rest, delta, position, low, full_low,
            K, V, k_descriptor, v_descriptor, start_row, kv_head, limit, window, factor,
            stride_kt, stride_kh, stride_vt, stride_vh, dq,
            KEYS, HEAD_DIM, DIM, SOURCE, True,
        )  # fmt: skip
        low = full_low
        full_high = tl.maximum(full_high, low)
    dq = _fold_dq(
        q, do, lse, rest, delta, position, low, full_high,
        K, V, k_descriptor, v_descriptor, start_row, kv_head, limit, window, factor,
        stride_kt, stride_kh, stride_vt, stride_vh, dq,
        KEYS, HEAD_DIM, DIM, SOURCE, False,
    )  # fmt: skip
    dq = _fold_dq(
        q, do, lse, rest, delta, position, full_high, high,
        K, V, k_descriptor, v_descriptor, start_row, kv_head, limit, window, factor,
        stride_kt, stride_kh, stride_vt, stride_vh, dq,
        KEYS, HEAD_DIM, DIM, SOURCE, True,
    )  # fmt: skip
    tl.store(
        dQ + token_row[:, None] * stride_dqt + head[:, None] * stride_dqh + dim[None, :],
        (dq.to(tl.float32) * scale + 0.0).to(dQ.dtype.element_ty), mask=mask,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "query_start", "query_len", "window"])
def attention_dkv_kernel(
    dO, Q, K, V, do_descriptor, q_descriptor, LSE, DELTA, dK, dV, tiles, query_start, query_len,
    window, factor, scale,
    stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: a matrix-step fold over the group's heads, then queries."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_key = tl.load(tiles + 2 * tile + 1)
    limit = tl.load(query_len + sequence)
    start_row = tl.load(query_start + sequence)
    key = first_key + tl.arange(0, KEYS)
    row = (start_row + key).to(tl.int64)
    dim = tl.arange(0, DIM)
    mask = (key < limit)[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(
        K + row[:, None] * stride_kt + kv_head * stride_kh + dim[None, :], mask=mask, other=0.0
    )
    v = tl.load(
        V + row[:, None] * stride_vt + kv_head * stride_vh + dim[None, :], mask=mask, other=0.0
    )
    dk = no_steps(KEYS, DIM, K.dtype.element_ty)
    dv = no_steps(KEYS, DIM, K.dtype.element_ty)
    # One loop over the group's heads and their query tiles; several spill registers.
    low = first_key // QUERIES * QUERIES
    high = limit
    if WINDOWED:
        high = tl.minimum(limit, first_key + KEYS - 1 + window)
    per_head = tl.cdiv(high - low, QUERIES)
    for step in tl.range(0, GROUP * per_head):
        head = kv_head * GROUP + step // per_head
        start = low + step % per_head * QUERIES
        query = start + tl.arange(0, QUERIES)
        inside = query < limit
        token_row = (start_row + query).to(tl.int64)
        q = load_rows(Q, q_descriptor, Q, start, start_row, head, limit, stride_qt, stride_qh, 1,
                       QUERIES, HEAD_DIM, DIM, SOURCE, SOURCE == 0)  # fmt: skip
        do = load_rows(dO, do_descriptor, dO, start, start_row, head, limit, stride_dot,
                        stride_doh, 1, QUERIES, HEAD_DIM, DIM, SOURCE, SOURCE == 0)  # fmt: skip
        # A query past the end gets an infinite normalizer, so its probabilities are 0.
        lse = tl.load(LSE + token_row * stride_lse + head, mask=inside, other=float("inf"))
        delta = tl.load(DELTA + token_row * stride_lse + head, mask=inside, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [KEYS, QUERIES]
        lse, rest = _log2_parts(lse)
        p = tl.exp2(tl.fma(scores, factor, -lse[None, :]) - rest[None, :])
        p = tl.where(visible(query[None, :], key[:, None], window), p, 0.0)
        dv = matrix_step(p.to(do.dtype), do, dv)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = matrix_step(ds.to(q.dtype), q, dk)
    tl.store(
        dK + row[:, None] * stride_dkt + kv_head * stride_dkh + dim[None, :],
        (dk.to(tl.float32) * scale + 0.0).to(dK.dtype.element_ty), mask=mask,
    )  # fmt: skip
    tl.store(
        dV + row[:, None] * stride_dvt + kv_head * stride_dvh + dim[None, :],
        (dv.to(tl.float32) + 0.0).to(dV.dtype.element_ty), mask=mask,
    )  # fmt: skip


def attention_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PackedSequences,
    scale: float,
    window: int | None,
    *,
    query_schedule: Schedule | None = None,
    key_schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtype of q; rows that no sequence owns are 0.

    The schedules are for tests and tuning; any choice gives the same bits. A specialised
    `key_schedule` makes dq as well.
    """
    do, q, k, v = (dense(x) for x in (do, q, k, v))
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    make = torch.empty if layout.owns(rows) else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if max(layout.query_lens, default=0) == 0:
        return dq, dk, dv
    reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
    factor = scale * LOG2E
    if key_schedule is None and query_schedule is None:
        fused = in_five_products(layout, do, q, k, v)
    else:
        fused = key_schedule is not None and key_schedule.specialized
    if fused:
        if query_schedule is not None or not admits(FIVE_PRODUCTS, layout, do, q, k, v):
            raise ValueError(UNSPECIALIZED)
        attention_backward_hopper.attention_hopper_bwd(
            do, q, k, v, out, lse, (dq, dk, dv), layout, scale, window, reach, factor
        )
        return dq, dk, dv
    dim = max(triton.next_power_of_2(head_dim), 16)
    delta = torch.empty_like(lse, dtype=torch.float32)
    attention_delta_kernel[(triton.cdiv(rows * heads, 32),)](
        do, out, delta, rows * heads, do.stride(0), do.stride(1), out.stride(0), out.stride(1),
        HEADS=heads, ROWS=32, HEAD_DIM=head_dim, DIM=dim, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    by_query = query_schedule or pick_backward(BACKWARD_QUERIES, q, dim)
    by_key = key_schedule or pick_backward(BACKWARD_KEYS, q, dim)
    tables = layout.tables(q.device)
    operands = (
        do.stride(0), do.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1),
    )  # fmt: skip
    shared = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "WINDOWED": window is not None,
        "enable_fp_fusion": False,
    }
    tiles = layout.tiles(q.device, group, by_query.rows)
    key_tiles = layout.key_tiles(q.device, by_key.keys)
    described = by_query.descriptors and describable(k, v)
    attention_dq_kernel[(len(tiles) * kv_heads,)](
        do, q, k, v, *sources(described, [by_query.keys, 1, dim], k, v), lse, delta, dq, tiles,
        tables.query_start, tables.query_len, reach, factor, scale, *operands,
        dq.stride(0), dq.stride(1), lse.stride(0), ROWS=by_query.rows, KEYS=by_query.keys,
        SOURCE=2 if described else 0, num_warps=by_query.warps, num_stages=by_query.stages,
        **shared,
    )  # fmt: skip
    described = by_key.descriptors and describable(do, q)
    attention_dkv_kernel[(len(key_tiles) * kv_heads,)](
        do, q, k, v, *sources(described, [by_key.rows, 1, dim], do, q), lse, delta, dk, dv,
        key_tiles, tables.query_start, tables.query_len, reach, factor, scale, *operands,
        dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1), lse.stride(0),
        QUERIES=by_key.rows, KEYS=by_key.keys, SOURCE=2 if described else 0,
        num_warps=by_key.warps, num_stages=by_key.stages, **shared,
    )  # fmt: skip
    return dq, dk, dv
