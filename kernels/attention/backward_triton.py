"""The backward pass in Triton, for any GPU, and the choice between it and the kernels of `hopper`.

dq goes by tiles of queries, dk and dv by tiles of keys. Every gradient is one chain of matrix
steps without atomics, so tiles may have any size. Both kernels compute the scores: seven products
in all. `attention_bwd` prefers the kernels with specialised warps in `hopper`, where they fit.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.hopper.backward import attention_hopper_bwd
from rl_consistency.kernels.attention.hopper.wide_backward import attention_wide_bwd
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import (
    KEYS_DESCRIPTORS,
    LOG2E,
    PER_CALL,
    QUERIES_DESCRIPTORS,
    SEVEN_PRODUCTS,
    SPECIALIZED,
    UNSPECIALIZED,
    AttentionSchedule,
    admits,
    describable,
    padded,
    pick_backward,
    pick_specialized,
)
from rl_consistency.kernels.attention.tiles_triton import (
    BackwardCall,
    addresses,
    dense,
    keys_of,
    load_rows,
    rows_of,
    sources,
    tile_of,
    visible,
)
from rl_consistency.kernels.core.launch import cdiv, remembered
from rl_consistency.kernels.reduction.tree_fold_triton import matrix_step, no_steps, tree_fold

LOG2E_VALUE = tl.constexpr(LOG2E)


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def attention_delta_kernel(
    dO, OUT, DELTA, num_rows, stride_dot, stride_doh, stride_ot, stride_oh, HEADS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """DELTA [num_rows = T * HEADS], ROWS of them per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    head = head[:, None]
    mask = (row < num_rows)[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    do = tl.load(addresses(dO, token, head, stride_dot, stride_doh, DIM), mask=mask, other=0.0)
    o = tl.load(addresses(OUT, token, head, stride_ot, stride_oh, DIM), mask=mask, other=0.0)
    product = do.to(tl.float32) * o.to(tl.float32)
    tl.store(DELTA + row, tree_fold(product, ROWS, DIM), mask=row < num_rows)


@triton.jit
def _log2_parts(lse):
    """lse in log2 units as a large and a small fp32 part; the small one is 0 where lse is fp32."""
    wide = lse * LOG2E_VALUE
    large = wide.to(tl.float32)
    rest = tl.zeros_like(large)
    if lse.dtype == tl.float64:
        # A query past the end has an infinite lse and no rest.
        rest = tl.where(tl.abs(large) == float("inf"), 0.0, wide - large.to(tl.float64))
        rest = rest.to(tl.float32)
    return large, rest


@triton.jit
def _fold_dq(
    q, do, lse, rest, delta, position, low, high, K, V, k_descriptor, v_descriptor, row0, kv_head,
    limit, window, factor, stride_kt, stride_kh, stride_vt, stride_vh, dq, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq [ROWS, DIM] after the keys low .. high."""
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


@triton.jit(do_not_specialize=PER_CALL)
def attention_dq_kernel(
    dO, Q, K, V, k_descriptor, v_descriptor, LSE, DELTA, dQ, tiles, query_start, query_len, window,
    factor, scale, stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt,
    stride_vh, stride_dqt, stride_dqh, stride_lse, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dq [T, H, HEAD_DIM] of one tile of ROWS rows of one KV head: a chain over keys upward.

    Grid: tiles * KV heads. Carried over blocks of keys: dq [ROWS, DIM].
    """
    _sequence, kv_head, first_row, start_row, limit, _limit = tile_of(
        tiles, query_start, query_len, query_len, KV_HEADS
    )
    valid, token, head, position = rows_of(first_row, kv_head, limit, 0, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    own = head[:, None]
    mask = valid[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    q = tl.load(addresses(Q, token_row, own, stride_qt, stride_qh, DIM), mask=mask, other=0.0)
    do = tl.load(addresses(dO, token_row, own, stride_dot, stride_doh, DIM), mask=mask, other=0.0)
    lse = tl.load(LSE + token_row * stride_lse + head, mask=valid, other=0.0)
    lse, rest = _log2_parts(lse)
    delta = tl.load(DELTA + token_row * stride_lse + head, mask=valid, other=0.0)
    first_position, last_position, low = keys_of(
        first_row, limit, limit, window, ROWS, GROUP, KEYS, WINDOWED
    )
    dq = no_steps(ROWS, DIM, Q.dtype.element_ty)
    full_low = low
    full_high = (first_position + 1) // KEYS * KEYS
    if WINDOWED:
        edge = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS
        full_low = tl.minimum(tl.maximum(edge, low), tl.maximum(full_high, low))
        full_high = tl.maximum(full_high, full_low)
    # Only blocks that every row sees whole need no mask.
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        begin = low if part == 0 else full_low if part == 1 else full_high
        end = full_low if part == 0 else full_high if part == 1 else last_position + 1
        dq = _fold_dq(
            q, do, lse, rest, delta, position, begin, end, K, V, k_descriptor, v_descriptor,
            start_row, kv_head, limit, window, factor, stride_kt, stride_kh, stride_vt, stride_vh,
            dq, KEYS, HEAD_DIM, DIM, SOURCE, part != 1,
        )  # fmt: skip
    tl.store(
        addresses(dQ, token_row, own, stride_dqt, stride_dqh, DIM),
        (dq.to(tl.float32) * scale + 0.0).to(dQ.dtype.element_ty), mask=mask,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_CALL)
def attention_dkv_kernel(
    dO, Q, K, V, do_descriptor, q_descriptor, LSE, DELTA, dK, dV, tiles, query_start, query_len,
    window, factor, scale, stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh,
    stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dk and dv [T, Hkv, HEAD_DIM] of one tile of KEYS keys of one KV head: chains over the group's
    heads upward, then over queries upward.

    Grid: tiles * KV heads. Carried over blocks of queries: dk and dv [KEYS, DIM].
    """
    _sequence, kv_head, first_key, start_row, limit, _limit = tile_of(
        tiles, query_start, query_len, query_len, KV_HEADS
    )
    key = first_key + tl.arange(0, KEYS)
    row = (start_row + key).to(tl.int64)
    mask = (key < limit)[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    k = tl.load(addresses(K, row, kv_head, stride_kt, stride_kh, DIM), mask=mask, other=0.0)
    v = tl.load(addresses(V, row, kv_head, stride_vt, stride_vh, DIM), mask=mask, other=0.0)
    dk = no_steps(KEYS, DIM, K.dtype.element_ty)
    dv = no_steps(KEYS, DIM, K.dtype.element_ty)
    # One loop over heads and query tiles: two nested loops would spill registers.
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
        # A query past the end gets an infinite lse, so its probabilities are 0.
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
        addresses(dK, row, kv_head, stride_dkt, stride_dkh, DIM),
        (dk.to(tl.float32) * scale + 0.0).to(dK.dtype.element_ty), mask=mask,
    )  # fmt: skip
    tl.store(
        addresses(dV, row, kv_head, stride_dvt, stride_dvh, DIM),
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
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    query_schedule: AttentionSchedule | None = None,
    key_schedule: AttentionSchedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtype of q, `into` memory if given; rows that no sequence owns are 0.

    Tests and tuning give schedules; none changes a bit. A specialised `key_schedule` computes dq
    as well.
    """
    do, q, k, v = (dense(x) for x in (do, q, k, v))
    dq, dk, dv = into or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not layout.owns(q.shape[0]):
        for gradient in (dq, dk, dv):
            gradient.zero_()
    if layout.most_queries == 0:
        return dq, dk, dv
    call = BackwardCall(
        do=do, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv, layout=layout, scale=scale,
        window=window,
    )  # fmt: skip
    specialized = key_schedule if key_schedule and key_schedule.specialized else None
    if key_schedule is None and query_schedule is None:
        specialized = pick_specialized(layout, do, q, k, v)
    if specialized is None:
        _seven_products(
            call,
            query_schedule or pick_backward(QUERIES_DESCRIPTORS, q),
            key_schedule or pick_backward(KEYS_DESCRIPTORS, q),
        )
        return dq, dk, dv
    known = specialized in SPECIALIZED and query_schedule is None
    if not known or not admits(specialized, layout, do, q, k, v):
        raise ValueError(UNSPECIALIZED)
    if specialized == SEVEN_PRODUCTS:
        attention_wide_bwd(call)
    else:
        attention_hopper_bwd(call)
    return dq, dk, dv


def _seven_products(
    call: BackwardCall, by_query: AttentionSchedule, by_key: AttentionSchedule
) -> None:
    """Fill dq by one kernel, dk and dv by another."""
    do, q, k, v, lse, device = call.do, call.q, call.k, call.v, call.lse, call.q.device
    heads, kv_heads, dim = q.shape[1], call.kv_heads, padded(call.head_dim)
    delta = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
    attention_delta_kernel[(cdiv(delta.numel(), 32),)](
        do, call.out, delta, delta.numel(), *do.stride()[:2], *call.out.stride()[:2],
        HEADS=heads, ROWS=32, HEAD_DIM=call.head_dim, DIM=dim, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    numbers = (
        *call.numbers[:2], call.reach, call.factor, call.scale, *do.stride()[:2],
        *call.operand_strides,
    )  # fmt: skip
    shared = {**call.shape, "KV_HEADS": kv_heads, "DIM": dim, "enable_fp_fusion": False}
    tiles = call.layout.tiles(device, call.group, by_query.rows)
    described = by_query.descriptors and describable(k, v)
    attention_dq_kernel[(len(tiles) * kv_heads,)](
        do, q, k, v, *sources(described, [by_query.keys, 1, dim], k, v), lse, delta, call.dq, tiles,
        *numbers, *call.dq.stride()[:2], lse.stride(0), ROWS=by_query.rows, KEYS=by_query.keys,
        SOURCE=2 if described else 0, num_warps=by_query.warps, num_stages=by_query.stages,
        **shared,
    )  # fmt: skip
    tiles = call.layout.key_tiles(device, by_key.keys)
    described = by_key.descriptors and describable(do, q)
    attention_dkv_kernel[(len(tiles) * kv_heads,)](
        do, q, k, v, *sources(described, [by_key.rows, 1, dim], do, q), lse, delta, call.dk,
        call.dv, tiles, *numbers, *call.dk.stride()[:2], *call.dv.stride()[:2], lse.stride(0),
        QUERIES=by_key.rows, KEYS=by_key.keys, SOURCE=2 if described else 0,
        num_warps=by_key.warps, num_stages=by_key.stages, **shared,
    )  # fmt: skip
