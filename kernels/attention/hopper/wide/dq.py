"""dq of heads of 129 to 256 on sm_90; see `hopper/wide/backward.py`.

A program owns 128 queries of one head. Each of two consumers has 64 of them, and their dq in
registers; a producer copies keys and values. There is room for two blocks of keys, which are needed
from the scores to dq, and for one of values.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.backward_parts import write_gradient
from rl_consistency.kernels.attention.hopper.head_parts import copy_masked_rows, start_scores
from rl_consistency.kernels.attention.hopper.tiles import (
    barriers,
    fresh_zero,
    keep_seen,
    signal,
    thread_barrier,
)
from rl_consistency.kernels.attention.schedules import PER_CALL, SEVEN_PRODUCTS
from rl_consistency.kernels.core.launch import remembered

ROWS = gl.constexpr(SEVEN_PRODUCTS.rows)
"""Queries of a consumer: those of a row of the statistics."""
KEYS = gl.constexpr(SEVEN_PRODUCTS.keys)
STAGES = gl.constexpr(SEVEN_PRODUCTS.stages)
"""Blocks of keys in shared memory."""


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
    K, V, q_desc, do_desc, k_desc, v_desc, q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full,
    k_empty, v_empty, place, stride_kt, stride_kh, stride_vt, stride_vh, HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The producer of dq: copy a program's queries, then its keys and values block by block."""
    head, first, start_row, limit, low, count, _tile = _queries_of(place, HEADS, WINDOWED)
    kv_head = head // GROUP
    mbarrier.expect(q_full, 2 * 2 * ROWS * DIM * 2)
    for which in gl.static_range(2):
        at = [start_row + first + which * ROWS, head, 0]
        tma.async_copy_global_to_shared(
            q_desc, at, q_full, q_buf.index(which).reshape([ROWS, 1, DIM])
        )
        tma.async_copy_global_to_shared(
            do_desc, at, q_full, do_buf.index(which).reshape([ROWS, 1, DIM])
        )
    for i in range(count):
        start = low + i * KEYS
        slot, turn = i % STAGES, i // STAGES & 1
        mbarrier.wait(k_empty.index(slot), turn ^ 1)
        if start + KEYS <= limit:
            at = [start_row + start, kv_head, 0]
            mbarrier.expect(k_full.index(slot), KEYS * DIM * 2)
            tma.async_copy_global_to_shared(
                k_desc, at, k_full.index(slot), k_bufs.index(slot).reshape([KEYS, 1, DIM])
            )
            mbarrier.wait(v_empty, i & 1 ^ 1)
            mbarrier.expect(v_full, KEYS * DIM * 2)
            tma.async_copy_global_to_shared(
                v_desc, at, v_full, v_buf.index(0).reshape([KEYS, 1, DIM])
            )
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
    STATISTICS, dQ, q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full, k_empty, v_empty, place,
    factor, scale, stride_dqt, stride_dqh, WHICH: gl.constexpr, HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """A consumer: dq of 64 queries, a chain over keys upward."""
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
    scores = warpgroup_mma_wait(
        0, deps=[start_scores((q_buf.index(WHICH),), (k_bufs.index(0),), S)]
    )
    for i in range(count):
        slot = i % STAGES
        zero = fresh_zero(i)
        mbarrier.wait(v_full, i & 1)
        dp = start_scores((do_buf.index(zero + WHICH),), (v_buf.index(zero),), S)
        scores = keep_seen(scores, query - low - i * KEYS, window, KEYS, WINDOWED)
        scores, shift = gl.broadcast(scores, -lse)
        p = gl.exp2(gl.fma(scores, gl.full_like(scores, factor), shift))
        dp = warpgroup_mma_wait(0, deps=[dp])
        signal(v_empty)
        ds = gl.convert_layout((p * (dp - delta)).to(k_bufs.dtype), operand)
        dq = warpgroup_mma(ds, k_bufs.index(slot), dq, is_async=True)
        after = gl.minimum(i + 1, count - 1)
        mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1)
        coming = start_scores((q_buf.index(zero + WHICH),), (k_bufs.index(after % STAGES),), S)
        dq = warpgroup_mma_wait(1, deps=[dq])
        signal(k_empty.index(slot))
        scores = warpgroup_mma_wait(0, deps=[coming])
    write_gradient(
        dQ, (dq,), scale, first, start_row, head, limit, stride_dqt, stride_dqh, HEAD_DIM, DIM
    )  # fmt: skip


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
    copied: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    q_buf = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], copied)
    do_buf = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], copied)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], copied)
    v_buf = gl.allocate_shared_memory(dtype, [1, KEYS, DIM], copied)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    q_full, v_full, v_empty = barriers(1).index(0), barriers(1).index(0), barriers(1).index(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    place = (tiles, first_tiles, query_start, query_len, window, num_tiles)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_fold_dq, (
                STATISTICS, dQ, q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full, k_empty,
                v_empty, place, factor, scale, stride_dqt, stride_dqh, 0, HEADS, HEAD_DIM, DIM,
                WINDOWED,
            )),
            (_fold_dq, (
                STATISTICS, dQ, q_buf, do_buf, k_bufs, v_buf, q_full, k_full, v_full, k_empty,
                v_empty, place, factor, scale, stride_dqt, stride_dqh, 1, HEADS, HEAD_DIM, DIM,
                WINDOWED,
            )),
            (_copy_keys, (
                K, V, q_desc, do_desc, k_desc, v_desc, q_buf, do_buf, k_bufs, v_buf, q_full,
                k_full, v_full, k_empty, v_empty, place, stride_kt, stride_kh, stride_vt,
                stride_vh, HEADS, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
