"""The backward pass on sm_90 for heads of 129 to 256, with specialised warps: one kernel for dq,
one for dk and dv.

One kernel for all (`hopper/backward.py`) would pass the sums of dq through memory after every 64
keys, since the sums of dk and dv for more would not fit the registers: twice the bytes of its
operands. So scores are computed twice, as `backward_triton` does, and the bits are the same.

dq: a program owns 128 queries of one head. Each of two consumers has 64 of them, and their dq in
registers; a producer copies keys and values. There is room for two blocks of keys, which are needed
from the scores to dq, and for one of values.

dk and dv: a program owns 64 keys of one KV head, for all query heads of the group. Each half of its
eight computing warps has the scores of half of a step's queries, which it hands to the other half
in shared memory, and half of the columns of dk and dv, in registers. One warp copies queries.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.backward import (
    copy_queries,
    load_rows,
    statistics_of,
    write_gradient,
)
from rl_consistency.kernels.attention.hopper.tiles import (
    OPTIONS,
    barriers,
    buffers,
    copy_masked_rows,
    copy_rows,
    fresh_zero,
    head_descriptor,
    keep_seen,
    signal,
    start_scores,
    thread_barrier,
)
from rl_consistency.kernels.attention.schedules import PER_CALL, SEVEN_PRODUCTS, padded
from rl_consistency.kernels.attention.tiles_triton import BackwardCall
from rl_consistency.kernels.core.launch import remembered

ROWS = gl.constexpr(SEVEN_PRODUCTS.rows)
"""Queries of a step or a consumer: those of a row of the statistics."""
KEYS = gl.constexpr(SEVEN_PRODUCTS.keys)
STAGES = gl.constexpr(SEVEN_PRODUCTS.stages)
"""Blocks of keys, or tiles of queries, in shared memory."""


@gluon.jit
def _queries_of(place, HEADS: gl.constexpr, WINDOWED: gl.constexpr):
    """(head, first query, its sequence's first row, its sequence's keys, first key seen, blocks of
    keys, number of the sequence's first tile of statistics) of a program of dq."""
    tiles, first_tiles, query_start, query_len, window, _num_tiles = place
    entry = tiles + gl.program_id(0) // HEADS * 2
    sequence, first = gl.load(entry), gl.load(entry + 1)
    limit = gl.load(query_len + sequence)
    low = limit * 0
    if WINDOWED:
        low = gl.maximum(first - window + 1, 0) // KEYS * KEYS
    high = gl.minimum(first + 2 * ROWS, limit)
    start_row, first_tile = gl.load(query_start + sequence), gl.load(first_tiles + sequence)
    head = gl.program_id(0) % HEADS
    return head, first, start_row, limit, low, gl.cdiv(high - low, KEYS), first_tile


@gluon.jit
def _copy_keys(
    K, V, q_desc, do_desc, k_desc, v_desc, held, place, stride_kt, stride_kh, stride_vt, stride_vh,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """The producer of dq: copy a program's queries, then its keys and values block by block."""
    q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full, k_empty, v_empty = held
    head, first, start_row, limit, low, count, _tile = _queries_of(place, HEADS, WINDOWED)
    kv_head = head // GROUP
    mbarrier.expect(q_full, 2 * 2 * ROWS * DIM * 2)
    for which in gl.static_range(2):
        query = start_row + first + which * ROWS
        copy_rows(q_desc, query, head, 0, q_full, q_buf.index(which), 1)
        copy_rows(do_desc, query, head, 0, q_full, do_buf.index(which), 1)
    for i in range(count):
        start = low + i * KEYS
        slot, turn = i % STAGES, i // STAGES & 1
        mbarrier.wait(k_empty.index(slot), turn ^ 1)
        if start + KEYS <= limit:
            from_row = start_row + start
            mbarrier.expect(k_full.index(slot), KEYS * DIM * 2)
            copy_rows(k_desc, from_row, kv_head, 0, k_full.index(slot), k_bufs.index(slot), 1)
            mbarrier.wait(v_empty, i & 1 ^ 1)
            mbarrier.expect(v_full, KEYS * DIM * 2)
            copy_rows(v_desc, from_row, kv_head, 0, v_full, v_buf.index(0), 1)
        else:
            # Rows past the sequence's end belong to another: a NaN there times 0 is NaN.
            row = (start_row + start).to(gl.int64)
            mbarrier.wait(v_empty, i & 1 ^ 1)
            k_from = K + row * stride_kt + kv_head.to(gl.int64) * stride_kh
            v_from = V + row * stride_vt + kv_head.to(gl.int64) * stride_vh
            k_buf, left = k_bufs.index(slot), limit - start
            copy_masked_rows(k_from, k_buf, 0, 0, left, stride_kt, stride_kh, 1, HEAD_DIM)
            copy_masked_rows(
                v_from, v_buf.index(0), 0, 0, left, stride_vt, stride_vh, 1, HEAD_DIM
            )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            signal(k_full.index(slot))
            signal(v_full)
        # Phases repeat, so no warp may fall behind by a whole round of the buffers.
        thread_barrier()


@gluon.jit
def _fold_dq(
    STATISTICS, dQ, held, place, factor, scale, strides, WHICH: gl.constexpr, HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """A consumer: dq of 64 queries, a chain over keys upward."""
    q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full, k_empty, v_empty = held
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D, k_width=2)
    head, first, start_row, limit, low, count, first_tile = _queries_of(place, HEADS, WINDOWED)
    window, num_tiles = place[4], place[5]
    first += WHICH * ROWS
    query = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    # The second half of a tile may have no row of statistics: none of its queries is there.
    tile = head * num_tiles + first_tile + first // ROWS
    at = STATISTICS + tile.to(gl.int64) * (2 * ROWS) + query % ROWS
    lse = gl.expand_dims(gl.load(at, mask=query < limit, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(at + ROWS, mask=query < limit, other=0.0), 1)
    dq = gl.zeros([ROWS, DIM], gl.float32, D)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[start_scores(q_buf.index(WHICH), k_bufs.index(0), S)])
    for i in range(count):
        slot = i % STAGES
        zero = fresh_zero(i)
        mbarrier.wait(v_full, i & 1)
        dp = start_scores(do_buf.index(zero + WHICH), v_buf.index(zero), S)
        scores = keep_seen(scores, query - low - i * KEYS, window, KEYS, WINDOWED)
        scores, shift = gl.broadcast(scores, -lse)
        p = gl.exp2(gl.fma(scores, gl.full_like(scores, factor), shift))
        dp = warpgroup_mma_wait(0, deps=[dp])
        signal(v_empty)
        ds = gl.convert_layout((p * (dp - delta)).to(k_bufs.dtype), operand)
        dq = warpgroup_mma(ds, k_bufs.index(slot), dq, is_async=True)
        after = gl.minimum(i + 1, count - 1)
        mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1)
        coming = start_scores(q_buf.index(zero + WHICH), k_bufs.index(after % STAGES), S)
        dq = warpgroup_mma_wait(1, deps=[dq])
        signal(k_empty.index(slot))
        scores = warpgroup_mma_wait(0, deps=[coming])
    write_gradient(dQ, dq, scale, (first, start_row, head, limit), strides, HEAD_DIM)


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_wide_dq_kernel(
    K, V, STATISTICS, dQ, q_desc, do_desc, k_desc, v_desc, tiles, first_tiles, query_start,
    query_len, window, num_tiles, factor, scale, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dqt, stride_dqh, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """dq [T, H, HEAD_DIM] of 128 queries of one head. Columns from HEAD_DIM to DIM are zeros.

    Grid: tiles * heads. Each consumer carries dq [64, DIM] over blocks of keys in registers.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_buf, do_buf = buffers(dtype, 2, ROWS, DIM), buffers(dtype, 2, ROWS, DIM)
    k_bufs, v_buf = buffers(dtype, STAGES, KEYS, DIM), buffers(dtype, 1, KEYS, DIM)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    q_full, v_full, v_empty = barriers(1).index(0), barriers(1).index(0), barriers(1).index(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    held = (q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full, k_empty, v_empty)
    place = (tiles, first_tiles, query_start, query_len, window, num_tiles)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_fold_dq, (
                STATISTICS, dQ, held, place, factor, scale, (stride_dqt, stride_dqh), 0, HEADS,
                HEAD_DIM, DIM, WINDOWED,
            )),
            (_fold_dq, (
                STATISTICS, dQ, held, place, factor, scale, (stride_dqt, stride_dqh), 1, HEADS,
                HEAD_DIM, DIM, WINDOWED,
            )),
            (_copy_keys, (
                K, V, q_desc, do_desc, k_desc, v_desc, held, place, stride_kt, stride_kh,
                stride_vt, stride_vh, HEADS, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _walk(place, GROUP: gl.constexpr, WINDOWED: gl.constexpr):
    """What `walk` says, of a program of dk and dv, which takes all heads of the group."""
    tiles, first_tiles, query_start, query_len, window, num_tiles, kv_heads = place
    entry = tiles + gl.program_id(0) // kv_heads * 2
    sequence, first_key = gl.load(entry), gl.load(entry + 1)
    limit = gl.load(query_len + sequence)
    high = limit
    if WINDOWED:
        high = gl.minimum(limit, first_key + KEYS - 1 + window)
    start_row = gl.load(query_start + sequence)
    kv_head = gl.program_id(0) % kv_heads
    first_head = kv_head * GROUP
    first_tile = first_head * num_tiles + gl.load(first_tiles + sequence)
    per_head = gl.cdiv(high - first_key, ROWS)
    return kv_head, first_head, GROUP, first_key, start_row, limit, first_tile, per_head


@gluon.jit
def _copy_queries(
    q_desc, do_desc, STATISTICS, ring, full, done, place, GROUP: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """`copy_queries` by `_walk`: Triton 3.6 takes no function as an argument of a warp."""
    copy_queries(q_desc, do_desc, STATISTICS, ring, full, done, place, _walk, GROUP, DIM, WINDOWED)


@gluon.jit
def _fold_dkv(
    K, V, dK, dV, ring, k_buf, v_buf, p_buf, ds_buf, full, done, place, factor, scale, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: dk and dv [KEYS, DIM], chains over heads, then queries upward."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    columns: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = p_buf.dtype
    kv_head, _first, heads, first_key, start_row, limit, _tile, per_head = _walk(
        place, GROUP, WINDOWED
    )
    q_bufs, do_bufs, lse_buf, delta_buf = ring
    window = place[4]
    own_keys = (first_key, start_row, kv_head, limit)
    load_rows(K, k_buf, own_keys, (stride_kt, stride_kh), HEAD_DIM)
    load_rows(V, v_buf, own_keys, (stride_vt, stride_vh), HEAD_DIM)
    fence_async_shared()
    thread_barrier()
    key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S))
    query = gl.arange(0, ROWS, layout=columns)
    dk = gl.zeros([KEYS, DIM], gl.float32, D)
    dv = gl.zeros([KEYS, DIM], gl.float32, D)
    steps = heads * per_head
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[start_scores(k_buf, q_bufs.index(0), S)])
    for step in range(steps):
        slot = step % STAGES
        q_buf, do_buf = q_bufs.index(slot), do_bufs.index(slot)
        dp = start_scores(v_buf, do_buf, S)
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
        coming = start_scores(k_buf, q_bufs.index(after % STAGES), S)
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        signal(done.index(slot))
        scores = warpgroup_mma_wait(0, deps=[coming])
    write_gradient(dK, dk, scale, own_keys, (stride_dkt, stride_dkh), HEAD_DIM)
    write_gradient(dV, dv, 1.0, own_keys, (stride_dvt, stride_dvh), HEAD_DIM)


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
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_bufs, do_bufs = buffers(dtype, STAGES, ROWS, DIM), buffers(dtype, STAGES, ROWS, DIM)
    k_buf, v_buf = buffers(dtype, 1, KEYS, DIM).index(0), buffers(dtype, 1, KEYS, DIM).index(0)
    p_buf, ds_buf = buffers(dtype, 1, KEYS, ROWS).index(0), buffers(dtype, 1, KEYS, ROWS).index(0)
    lse_buf = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    delta_buf = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    full, done = barriers(STAGES), barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(done.index(i), count=1)
    ring = (q_bufs, do_bufs, lse_buf, delta_buf)
    place = (tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_fold_dkv, (
                K, V, dK, dV, ring, k_buf, v_buf, p_buf, ds_buf, full, done, place, factor, scale,
                stride_kt, stride_kh, stride_vt, stride_vh, stride_dkt, stride_dkh, stride_dvt,
                stride_dvh, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
            (_copy_queries, (
                q_desc, do_desc, STATISTICS, ring, full, done, place, GROUP, DIM, WINDOWED,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def attention_wide_bwd(call: BackwardCall) -> None:
    """Fill dq, dk and dv."""
    do, q, k, v, dq, dk, dv = call.do, call.q, call.k, call.v, call.dq, call.dk, call.dv
    heads, dim, device, rows = q.shape[1], padded(call.head_dim), q.device, SEVEN_PRODUCTS.rows
    stat_tiles, first_tiles = call.layout.query_tiles(device, rows)
    statistics, _counters = statistics_of(do, call.out, call.lse, call.layout, rows)
    q_desc, do_desc, k_desc, v_desc = (head_descriptor(x, rows, 1, dim) for x in (q, do, k, v))
    numbers = (
        first_tiles, *call.numbers[:2], call.reach, len(stat_tiles), call.factor, call.scale,
        *k.stride()[:2], *v.stride()[:2],
    )  # fmt: skip
    shared = {**call.shape, "DIM": dim, "maxnreg": 168, **OPTIONS}
    tiles = call.layout.tiles(device, 1, 2 * rows)
    attention_wide_dq_kernel[(len(tiles) * heads,)](
        k, v, statistics, dq, q_desc, do_desc, k_desc, v_desc, tiles, *numbers, *dq.stride()[:2],
        HEADS=heads, num_warps=4, **shared,
    )  # fmt: skip
    tiles = call.layout.key_tiles(device, SEVEN_PRODUCTS.keys)
    attention_wide_dkv_kernel[(len(tiles) * call.kv_heads,)](
        k, v, statistics, dk, dv, q_desc, do_desc, tiles, *numbers, *dk.stride()[:2],
        *dv.stride()[:2], KV_HEADS=call.kv_heads, num_warps=8, **shared,
    )  # fmt: skip
