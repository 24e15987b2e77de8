"""dk and dv of heads of 129 to 256 on sm_90; see `hopper/wide/backward.py`.

A program owns 64 keys of one KV head, for all query heads of the group. Each half of its eight
computing warps has the scores of half of a step's queries, which it hands to the other half in
shared memory, and half of the columns of dk and dv, in registers. One warp copies queries.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.backward_parts import load_rows, write_gradient
from rl_consistency.kernels.attention.hopper.head_parts import start_scores
from rl_consistency.kernels.attention.hopper.tiles import barriers, signal, thread_barrier
from rl_consistency.kernels.attention.schedules import PER_CALL, SEVEN_PRODUCTS
from rl_consistency.kernels.core.launch import remembered

ROWS = gl.constexpr(SEVEN_PRODUCTS.rows)
"""Queries of a step: those of a row of the statistics."""
KEYS = gl.constexpr(SEVEN_PRODUCTS.keys)
STAGES = gl.constexpr(SEVEN_PRODUCTS.stages)
"""Tiles of queries in shared memory."""


@gluon.jit
def _keys_of(place, KV_HEADS: gl.constexpr, WINDOWED: gl.constexpr):
    """(KV head, first key, its sequence's first row, its sequence's keys, tiles of queries per
    head, number of the sequence's first tile of statistics) of a program of dk and dv."""
    tiles, first_tiles, query_start, query_len, window, _num_tiles = place
    entry = tiles + gl.program_id(0) // KV_HEADS * 2
    sequence, first_key = gl.load(entry), gl.load(entry + 1)
    limit = gl.load(query_len + sequence)
    high = limit
    if WINDOWED:
        high = gl.minimum(limit, first_key + KEYS - 1 + window)
    start_row, first_tile = gl.load(query_start + sequence), gl.load(first_tiles + sequence)
    per_head = gl.cdiv(high - first_key, ROWS)
    return gl.program_id(0) % KV_HEADS, first_key, start_row, limit, per_head, first_tile


@gluon.jit
def _copy_queries(
    q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done, place,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: fill the ring with q, do and the two statistics of each step's queries."""
    lane = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    kv_head, first_key, start_row, _limit, per_head, first_tile = _keys_of(
        place, KV_HEADS, WINDOWED
    )
    num_tiles = place[5]
    for step in range(GROUP * per_head):
        head, first = kv_head * GROUP + step // per_head, first_key + step % per_head * ROWS
        tile = head * num_tiles + first_tile + first // ROWS
        statistics = STATISTICS + tile.to(gl.int64) * (2 * ROWS) + lane
        lse = gl.load(statistics)
        delta = gl.load(statistics + ROWS)
        slot = step % STAGES
        at = [start_row + first, head, 0]
        q_buf = q_bufs.index(slot).reshape([ROWS, 1, DIM])
        do_buf = do_bufs.index(slot).reshape([ROWS, 1, DIM])
        mbarrier.wait(done.index(slot), step // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(slot), 2 * ROWS * DIM * 2)
        tma.async_copy_global_to_shared(q_desc, at, full.index(slot), q_buf)
        tma.async_copy_global_to_shared(do_desc, at, full.index(slot), do_buf)
        lse_buf.index(slot).store(lse)
        delta_buf.index(slot).store(delta)
        signal(full.index(slot))


@gluon.jit
def _fold_dkv(
    K, V, dK, dV, q_bufs, do_bufs, lse_buf, delta_buf, k_buf, v_buf, p_buf, ds_buf, full, done,
    place, factor, scale, stride_kt, stride_kh, stride_vt, stride_vh, stride_dkt, stride_dkh,
    stride_dvt, stride_dvh, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: dk and dv [KEYS, DIM], chains over heads, then queries upward."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    columns: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = p_buf.dtype
    kv_head, first_key, start_row, limit, per_head, _tile = _keys_of(place, KV_HEADS, WINDOWED)
    window = place[4]
    load_rows(
        K, (k_buf,), first_key, start_row, kv_head, limit, stride_kt, stride_kh, HEAD_DIM, DIM
    )  # fmt: skip
    load_rows(
        V, (v_buf,), first_key, start_row, kv_head, limit, stride_vt, stride_vh, HEAD_DIM, DIM
    )  # fmt: skip
    fence_async_shared()
    thread_barrier()
    key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S))
    query = gl.arange(0, ROWS, layout=columns)
    dk = gl.zeros([KEYS, DIM], gl.float32, D)
    dv = gl.zeros([KEYS, DIM], gl.float32, D)
    steps = GROUP * per_head
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[start_scores((k_buf,), (q_bufs.index(0),), S)])
    for step in range(steps):
        slot = step % STAGES
        q_buf, do_buf = q_bufs.index(slot), do_bufs.index(slot)
        dp = start_scores((v_buf,), (do_buf,), S)
        distance = gl.expand_dims(query + first_key + step % per_head * ROWS, 0)
        distance, own = gl.broadcast(distance, gl.expand_dims(key, 1))
        distance -= own
        seen = distance >= 0
        if WINDOWED:
            seen = seen & (distance < window)
        scores, shift = gl.broadcast(scores, -gl.expand_dims(lse_buf.index(slot).load(columns), 0))
        p = gl.where(seen, gl.exp2(gl.fma(scores, gl.full_like(scores, factor), shift)), 0.0)
        p_buf.store(p.to(dtype))
        fence_async_shared()
        thread_barrier()
        dv = warpgroup_mma(p_buf, do_buf, dv, is_async=True)
        delta = gl.expand_dims(delta_buf.index(slot).load(columns), 0)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds_buf.store((p * (dp - delta)).to(dtype))
        fence_async_shared()
        thread_barrier()
        dk = warpgroup_mma(ds_buf, q_buf, dk, is_async=True)
        # The last step repeats its own scores, unread: a branch would cost time in every step.
        after = gl.minimum(step + 1, steps - 1)
        mbarrier.wait(full.index(after % STAGES), after // STAGES & 1)
        coming = start_scores((k_buf,), (q_bufs.index(after % STAGES),), S)
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        signal(done.index(slot))
        scores = warpgroup_mma_wait(0, deps=[coming])
    write_gradient(
        dK, (dk,), scale, first_key, start_row, kv_head, limit, stride_dkt, stride_dkh, HEAD_DIM,
        DIM,
    )  # fmt: skip
    write_gradient(
        dV, (dv,), 1.0, first_key, start_row, kv_head, limit, stride_dvt, stride_dvh, HEAD_DIM, DIM
    )  # fmt: skip


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_wide_dkv_kernel(
    K, V, STATISTICS, dK, dV, q_desc, do_desc, tiles, first_tiles, query_start, query_len, window,
    num_tiles, factor, scale, stride_kt, stride_kh, stride_vt, stride_vh, stride_dkt, stride_dkh,
    stride_dvt, stride_dvh, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """dk and dv [Tkv, Hkv, HEAD_DIM] of 64 keys of one KV head. Columns from HEAD_DIM to DIM are
    zeros.

    Grid: tiles * KV heads. Registers carry dk and dv [64, DIM] over tiles of queries.
    """
    dtype: gl.constexpr = q_desc.dtype
    copied: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DIM], copied)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DIM], copied)
    k_buf = gl.allocate_shared_memory(dtype, [1, KEYS, DIM], copied).index(0)
    v_buf = gl.allocate_shared_memory(dtype, [1, KEYS, DIM], copied).index(0)
    p_buf = gl.allocate_shared_memory(dtype, [1, KEYS, ROWS], square).index(0)
    ds_buf = gl.allocate_shared_memory(dtype, [1, KEYS, ROWS], square).index(0)
    lse_buf = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    delta_buf = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    full, done = barriers(STAGES), barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(done.index(i), count=1)
    place = (tiles, first_tiles, query_start, query_len, window, num_tiles)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_fold_dkv, (
                K, V, dK, dV, q_bufs, do_bufs, lse_buf, delta_buf, k_buf, v_buf, p_buf, ds_buf,
                full, done, place, factor, scale, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh, KV_HEADS, GROUP, HEAD_DIM, DIM,
                WINDOWED,
            )),
            (_copy_queries, (
                q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done,
                place, KV_HEADS, GROUP, DIM, WINDOWED,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
