"""The backward pass on sm_90 in five products: one kernel with specialised warps.

A program owns 128 keys of one KV head, for all query heads of the group or for some. It continues
the chains of dq that earlier keys have left in memory (`backward_copies`), and the sums of dk and
dv that earlier heads have. The bits are those of the two kernels of `backward_triton`; scores are
computed once.

A step is a tile of queries. To keep the matrix units busy, a step starts the next step's scores
behind its own products, and computes dq before dk, so that dq leaves during dk's product. The
columns of a head are held in one part or in two (`head_parts`), and products come in as many.

A program waits only for programs with lower ids (`backward_programs`). Devices start
programs in the order of their ids, so those run already; no device promises this.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.backward_copies import (
    ENTRY,
    KEYS,
    QUERIES,
    STAGES,
    chain_buffer,
    chain_view,
    copy_queries,
    count,
    empty_chains,
    fetch_chains,
    leave_chains,
    query_layout,
    step_at,
    tiles_before,
    until,
    walk,
)
from rl_consistency.kernels.attention.hopper.backward_parts import (
    add_product,
    add_transposed_product,
    load_rows,
    load_sums,
    store_sums,
    write_gradient,
    zeros,
)
from rl_consistency.kernels.attention.hopper.backward_programs import backward_programs
from rl_consistency.kernels.attention.hopper.head_parts import (
    buffer_at,
    buffers,
    finished,
    parts_of,
    start_scores,
)
from rl_consistency.kernels.attention.hopper.tiles import (
    OPTIONS,
    barriers,
    fresh_zero,
    head_descriptor,
    thread_barrier,
)
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import PER_CALL, padded
from rl_consistency.kernels.attention.tiles_triton import BackwardCall, addresses
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.reduction.tree_fold_triton import LOG2E, tree_fold


@gluon.jit
def _probabilities(scores, lse, ahead, window, factor, WINDOWED: gl.constexpr):
    """p [KEYS, QUERIES] = exp2(scores * factor - lse), 0 where a query does not see a key.

    `ahead` is the tile's first query minus the program's first key.
    """
    S: gl.constexpr = scores.type.layout
    scores, shift = gl.broadcast(scores, -gl.expand_dims(lse, 0))
    p = gl.exp2(gl.fma(scores, gl.full_like(scores, factor), shift))
    # Query minus key as a part of the thread and constants, which take no registers.
    key = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, S)), 1)
    query = gl.expand_dims(gl.arange(0, QUERIES, layout=gl.SliceLayout(0, S)), 0)
    own = key // 16 * 16 + key % 8 - query % 8 // 2 * 2
    rest = query // 8 * 8 + query % 2 - key // 8 % 2 * 8
    seen = rest >= own - ahead
    if WINDOWED:
        seen = seen & (rest < own - ahead + window)
    return gl.where(seen, p, 0.0)


@gluon.jit
def _next_scores(k_buf, q_bufs, full, step, steps, S: gl.constexpr):
    """Start the scores of the next step. The last step repeats its own, unread: a branch would cost
    time in every step."""
    after = gl.minimum(step + 1, steps - 1)
    mbarrier.wait(full.index(after % STAGES), (after // STAGES) & 1)
    return start_scores(k_buf, buffer_at(q_bufs, after % STAGES), S)


@gluon.jit
def _send(
    dQ, out_buf, free, dq, step, ahead, first_key, start_row, head, limit, scale, stride_dqt,
    stride_dqh, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Round and store dq if these are its last keys, else leave it to `leave_chains`."""
    mbarrier.wait(free, step & 1 ^ 1)
    if ahead < KEYS:
        write_gradient(
            dQ, dq, scale, first_key + ahead, start_row, head, limit, stride_dqt, stride_dqh,
            HEAD_DIM, DIM,
        )  # fmt: skip
    else:
        for i in gl.static_range(len(dq)):
            chain_view(out_buf[i]).store(dq[i])
        fence_async_shared()


@gluon.jit
def _consume(
    K, V, dQ, dK, dV, SUMS, handed, q_bufs, do_bufs, lse_buf, delta_buf, k_bufs, v_bufs, ds_bufs,
    in_buf, out_buf, full, done, ready, gone, free, place, factor, scale, stride_kt, stride_kh,
    stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The eight computing warps: five products per step; registers carry dk and dv [KEYS, DIM]."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])
    PARTS: gl.constexpr = len(parts_of(DIM))
    columns: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = ds_bufs.dtype
    kv_head, first_head, heads, first_key, start_row, limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    window, num_tiles = place[4], place[5]
    load_rows(
        K, buffer_at(k_bufs, 0), first_key, start_row, kv_head, limit, stride_kt, stride_kh,
        HEAD_DIM, DIM,
    )  # fmt: skip
    load_rows(
        V, buffer_at(v_bufs, 0), first_key, start_row, kv_head, limit, stride_vt, stride_vh,
        HEAD_DIM, DIM,
    )  # fmt: skip
    fence_async_shared()
    thread_barrier()
    dk = zeros(KEYS, DIM)
    dv = zeros(KEYS, DIM)
    entry = place[0] + ENTRY * gl.program_id(0)
    before = first_head - kv_head * GROUP
    if before > 0:
        until(handed + gl.load(entry + 5), gl.cdiv(before, heads))
        dk = load_sums(SUMS, entry, 0, dk, DIM)
        dv = load_sums(SUMS, entry, 1, dv, DIM)
    steps = heads * per_head
    mbarrier.wait(full.index(0), 0)
    first = start_scores(buffer_at(k_bufs, 0), buffer_at(q_bufs, 0), S)
    scores = warpgroup_mma_wait(0, deps=[first])
    for step in range(steps):
        head, ahead, _tile, slot, _turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        q_buf, do_buf = buffer_at(q_bufs, slot), buffer_at(do_bufs, slot)
        zero = fresh_zero(step)
        k_buf, v_buf = buffer_at(k_bufs, zero), buffer_at(v_bufs, zero)
        ds_buf = ds_bufs.index(zero)
        dp = start_scores(v_buf, do_buf, S)
        lse = lse_buf.index(slot).load(columns)
        p = _probabilities(scores, lse, ahead, window, factor, WINDOWED)
        dv = add_product(dv, p.to(dtype), do_buf)
        delta = gl.expand_dims(delta_buf.index(slot).load(columns), 0)
        dp = warpgroup_mma_wait(PARTS, deps=[dp])
        ds = (p * (dp - delta)).to(dtype)
        # A chain without earlier keys starts from zero.
        begun = tiles_before(first_key, ahead, window, WINDOWED) > 0
        mbarrier.wait(ready, step & 1)
        dq = ()
        for i in gl.static_range(PARTS):
            view = chain_view(in_buf[i])
            dq = dq + (gl.where(begun, view.load(query_layout(view.shape[1])), 0.0),)
        ds_buf.store(ds)
        fence_async_shared()
        thread_barrier()
        dq = add_transposed_product(dq, ds_buf, k_buf)
        dk = add_product(dk, ds, q_buf)
        both = finished(dq + dv, PARTS)
        dq, dv = both[:PARTS], both[PARTS:]
        _send(
            dQ, out_buf, free, dq, step, ahead, first_key, start_row, first_head + head,
            limit, scale, stride_dqt, stride_dqh, HEAD_DIM, DIM,
        )  # fmt: skip
        # The compiler puts barriers of all warps around every arrival: here the matrix units still
        # have work.
        coming = _next_scores(k_buf, q_bufs, full, step, steps, S)
        thread_barrier()
        mbarrier.arrive(gone.index(slot), count=1)
        dk = finished(dk, PARTS)
        thread_barrier()
        mbarrier.arrive(done.index(slot), count=1)
        thread_barrier()
        scores = warpgroup_mma_wait(0, deps=[coming])
    if before + heads < GROUP:
        store_sums(SUMS, entry, 0, dk, DIM)
        store_sums(SUMS, entry, 1, dv, DIM)
        count(handed + gl.load(entry + 5))
    else:
        write_gradient(
            dK, dk, scale, first_key, start_row, kv_head, limit, stride_dkt, stride_dkh, HEAD_DIM,
            DIM,
        )  # fmt: skip
        write_gradient(
            dV, dv, 1.0, first_key, start_row, kv_head, limit, stride_dvt, stride_dvh, HEAD_DIM,
            DIM,
        )  # fmt: skip


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_backward_hopper_kernel(
    K, V, dQ, dK, dV, SUMS, handed, CHAINS, STATISTICS, counters, q_desc, do_desc, chain_desc,
    q_rest, do_rest, chain_rest, programs, first_tiles, query_start, query_len, window, num_tiles,
    factor, scale, stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt,
    stride_dkh, stride_dvt, stride_dvh, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """dk and dv [Tkv, Hkv, HEAD_DIM] of one tile of keys of one KV head, and its part of dq
    [T, H, HEAD_DIM]. Columns from HEAD_DIM to DIM are zeros, which change no sum.

    Grid: one program per entry of `programs`. STATISTICS and `counters` come from `statistics_of`,
    CHAINS (the sums of dq) from `empty_chains`. SUMS [places, 2, KEYS * DIM] fp32 holds dk and dv
    between programs, `handed` [places] how many programs have added to them. The descriptors
    `*_rest` are of the second part of the columns, None where there is one part.
    """
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_descs, do_descs, chain_descs = (q_desc,), (do_desc,), (chain_desc,)
    if q_rest is not None:
        q_descs, do_descs, chain_descs = (
            (q_desc, q_rest), (do_desc, do_rest), (chain_desc, chain_rest)
        )  # fmt: skip
    q_bufs = buffers(dtype, STAGES, QUERIES, DIM)
    do_bufs = buffers(dtype, STAGES, QUERIES, DIM)
    k_bufs = buffers(dtype, 1, KEYS, DIM)
    v_bufs = buffers(dtype, 1, KEYS, DIM)
    ds_bufs = gl.allocate_shared_memory(
        dtype, [1, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    )
    in_buf, out_buf = chain_buffer(chain_descs), chain_buffer(chain_descs)
    lse_buf = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], flat)
    delta_buf = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], flat)
    full, done = barriers(STAGES), barriers(STAGES)
    # ready: in_buf holds dq so far. free: out_buf may be written. gone: a step's dq has left.
    ready, free, gone = barriers(1).index(0), barriers(1).index(0), barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(gone.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    place = (programs, first_tiles, query_start, query_len, window, num_tiles)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                K, V, dQ, dK, dV, SUMS, handed, q_bufs, do_bufs, lse_buf, delta_buf, k_bufs,
                v_bufs, ds_bufs, in_buf, out_buf, full, done, ready, gone, free, place, factor,
                scale, stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
            (copy_queries, (
                q_descs, do_descs, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done,
                place, GROUP, DIM, WINDOWED,
            )),
            (fetch_chains, (
                CHAINS, chain_descs, in_buf, counters, ready, gone, place, GROUP, DIM, WINDOWED,
            )),
            (leave_chains, (
                chain_descs, out_buf, counters, gone, free, place, GROUP, DIM, WINDOWED,
            )),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=PER_CALL)
def attention_statistics_kernel(
    dO, OUT, LSE, STATISTICS, counters, tiles, query_start, query_len, num_tiles, stride_dot,
    stride_doh, stride_ot, stride_oh, stride_lse, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Write one tile's row of STATISTICS [heads * tiles, 2, ROWS], lse in log2 units and delta, and
    set its counter to 0. Grid: (tiles, heads)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    position = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    inside = position < tl.load(query_len + sequence)
    row = (tl.load(query_start + sequence) + position).to(tl.int64)
    mask = inside[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    do = tl.load(addresses(dO, row, head, stride_dot, stride_doh, DIM), mask=mask, other=0.0)
    o = tl.load(addresses(OUT, row, head, stride_ot, stride_oh, DIM), mask=mask, other=0.0)
    # A query past the end gets an infinite lse, so its probabilities are 0.
    lse = tl.load(LSE + row * stride_lse + head, mask=inside, other=float("inf"))
    place = head * num_tiles + tile
    to = STATISTICS + place.to(tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(to, lse * LOG2E)
    tl.store(to + ROWS, tree_fold(do.to(tl.float32) * o.to(tl.float32), ROWS, DIM))
    tl.store(counters + place, 0)


def statistics_of(
    do: Tensor, out: Tensor, lse: Tensor, layout: PackedSequences, rows: int
) -> tuple[Tensor, Tensor]:
    """(STATISTICS [heads * tiles, 2, rows] fp32, counters [heads * tiles] int32, all 0)."""
    heads, head_dim = do.shape[1:]
    tables = layout.tables(do.device)
    tiles, _ = layout.query_tiles(do.device, rows)
    statistics = torch.empty(heads * len(tiles), 2, rows, dtype=torch.float32, device=do.device)
    counters = torch.empty(heads * len(tiles), dtype=torch.int32, device=do.device)
    attention_statistics_kernel[(len(tiles), heads)](
        do, out, lse, statistics, counters, tiles, tables.query_start, tables.query_len,
        len(tiles), *do.stride()[:2], *out.stride()[:2], lse.stride(0),
        ROWS=rows, HEAD_DIM=head_dim, DIM=padded(head_dim), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return statistics, counters


def attention_hopper_bwd(call: BackwardCall) -> None:
    """Fill dq, dk and dv."""
    do, q, k, v, dq, dk, dv = call.do, call.q, call.k, call.v, call.dq, call.dk, call.dv
    heads, dim, device = q.shape[1], padded(call.head_dim), q.device
    query_tiles, first_tiles = call.layout.query_tiles(device, QUERIES.value)
    statistics, counters = statistics_of(do, call.out, call.lse, call.layout, QUERIES.value)
    chains, chain_descs = empty_chains(call.layout, heads, dim, device)
    parts = [
        (*(head_descriptor(x, QUERIES.value, 1, columns) for x in (q, do)), chain_desc)
        for (_, columns), chain_desc in zip(parts_of(dim), chain_descs, strict=True)
    ]
    boxes, rest = [*parts, (None, None, None)][:2]
    programs = backward_programs(
        call.layout, device, call.kv_heads, call.group, sm_count(device), call.window
    )
    entries, sums, handed = programs.entries, chains, counters
    if programs.places:
        sums = torch.empty(programs.places, 2, KEYS.value * dim, dtype=torch.float32, device=device)
        handed = torch.zeros(programs.places, dtype=torch.int32, device=device)
    attention_backward_hopper_kernel[(len(entries),)](
        k, v, dq, dk, dv, sums, handed, chains, statistics, counters, *boxes, *rest, entries,
        first_tiles, call.tables.query_start, call.tables.query_len, call.reach, len(query_tiles),
        call.factor, call.scale, *k.stride()[:2], *v.stride()[:2], *dq.stride()[:2],
        *dk.stride()[:2], *dv.stride()[:2], GROUP=call.group, HEAD_DIM=call.head_dim, DIM=dim,
        WINDOWED=call.windowed, num_warps=8, maxnreg=168, **OPTIONS,
    )  # fmt: skip
