"""Decode on sm_90 where sequences share their first keys: these are read once for all of them.

Rows of a matrix step are independent, and so are the folds of rows. So the queries of sequences
whose first keys lie in the same cache blocks stand in one tile, and each row's sums are the ones
that its own sequence would have after these blocks. `decode` goes on from there.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.attention.hopper.decode import (
    REGISTERS,
    WRITTEN_FLOATS,
    all_written,
    block_at,
    block_product,
    block_scores,
    copy_next,
    exponentials,
    first_sums,
    fold_block,
    fold_written,
    folded_layout,
    load_queries,
    row_buffers,
    write_block,
    write_sums,
)
from rl_consistency.kernels.attention.hopper.tiles import OPTIONS, WARPS, thread_barrier
from rl_consistency.kernels.attention.schedules import PER_CALL, key_block
from rl_consistency.kernels.attention.tiles_triton import ForwardCall

KEYS = gl.constexpr(key_block(128))


@gluon.jit(do_not_specialize=PER_CALL)
def attention_prefix_kernel(
    Q, K, V, sum_m, sum_lanes, sum_acc, block_m, block_lanes, block_acc, tickets, runs,
    query_start, query_len, tables, factor, num_blocks, slots, stride_qt, stride_qh, stride_kt,
    stride_kh, stride_vt, stride_vh, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, TILES: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
    SPLIT: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """m [T * H], lanes [T * H, 8] and acc [T * H, DIM] of one tile of ROWS rows of one run's
    queries and one KV head, after the whole blocks of the run's shared keys.

    Grid: (runs * TILES * KV heads, programs of a tile), with equal shares of the run's key blocks.
    With SPLIT each block is written to block_m, block_lanes and block_acc, and the last program
    folds them. Every row sees all these keys, so nothing is masked.
    """
    gdc_wait()
    gdc_launch_dependents()
    DOWN: gl.constexpr = ROWS // 16
    ACROSS: gl.constexpr = WARPS // DOWN
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [DOWN, ACROSS], [16, 8])
    lane_layout: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [DOWN, ACROSS], [1, 0])
    lane_rows: gl.constexpr = gl.SliceLayout(1, lane_layout)
    rows: gl.constexpr = gl.SliceLayout(1, S)
    kv_head = gl.program_id(0) % KV_HEADS
    run = runs + 3 * (gl.program_id(0) // KV_HEADS // TILES)
    first_row = gl.program_id(0) // KV_HEADS % TILES * ROWS
    first = gl.load(run)
    last = first + gl.load(run + 1) - 1
    count = gl.load(run + 2) // KEYS
    start_row = gl.load(query_start + first)
    # Rows between the queries of two sequences are computed too; nobody reads their sums.
    queries = gl.load(query_start + last) + gl.load(query_len + last) - start_row
    end_row = queries * GROUP
    if (count == 0) | (first_row >= end_row):
        return
    ring = row_buffers(K.dtype.element_ty, RING, KEYS, DIM)
    table = tables + first.to(gl.int64) * num_blocks
    share = gl.cdiv(count, gl.num_programs(1)) * KEYS
    begin = gl.program_id(1) * share
    end = gl.minimum(begin + share, count * KEYS)

    # The ring holds K, V, K, V ...; its number of buffers is odd. See `decode`.
    k_base, v_base = K + kv_head * stride_kh, V + kv_head * stride_vh
    pages = (k_base, v_base, stride_kt, stride_vt, table, end, end)
    following = block_at(begin, pages, BLOCK, KEYS)
    for j in gl.static_range(RING - 1):
        following = copy_next(ring.index(j), j % 2 == 1, following, pages, BLOCK, DIM)

    row = first_row + gl.arange(0, ROWS, layout=rows)
    q = load_queries(Q, row, start_row, queries, kv_head, stride_qt, stride_qh, GROUP, DIM, DIM, S)
    sums, written = (sum_m, sum_lanes, sum_acc), (block_m, block_lanes, block_acc)
    own_rows = (start_row * (KV_HEADS * GROUP) + kv_head * GROUP, first_row, end_row)
    m, lanes, acc = first_sums(
        sums, own_rows, 0, ROWS, DIM, DIM, KV_HEADS, GROUP, False, lane_layout, S
    )
    lane_m = gl.convert_layout(m, lane_rows)
    first_slot = gl.program_id(0).to(gl.int64) * slots
    for i in range(gl.maximum(gl.cdiv(end - begin, KEYS), 0)):
        # Once all threads have waited, the buffer behind the awaited one is free.
        async_copy.wait_group(RING - 2)
        thread_barrier()
        buffer = ring.index((2 * i + RING - 1) % RING)
        following = copy_next(buffer, False, following, pages, BLOCK, DIM)
        scores = block_scores(q, ring.index(2 * i % RING), S)
        block_max, p, part = exponentials(scores, factor, ROWS, ACROSS, lane_layout)
        rounded = gl.convert_layout(p.to(V.dtype.element_ty), gl.DotOperandLayout(0, S, 2))
        async_copy.wait_group(RING - 2)
        thread_barrier()
        buffer = ring.index((2 * i + RING) % RING)
        following = copy_next(buffer, True, following, pages, BLOCK, DIM)
        product = block_product(rounded, ring.index((2 * i + 1) % RING), S)
        if SPLIT:
            write_block(written, first_slot + begin // KEYS + i, block_max, part, product, ROWS)
        else:
            m, lane_m, lanes, acc = fold_block(m, lane_m, lanes, acc, block_max, part, product)
    async_copy.wait_group(0)
    if SPLIT:
        # A program stores its blocks before it counts itself.
        thread_barrier()
        ticket = tickets + gl.program_id(0)
        if all_written(ticket, gl.program_id(1), gl.num_programs(1), 1):
            all_m, all_lanes, all_acc = first_sums(
                sums, own_rows, 0, ROWS, DIM, DIM, KV_HEADS, GROUP, False,
                folded_layout(ROWS, DIM, True), folded_layout(ROWS, DIM, False),
            )  # fmt: skip
            all_m, all_lanes, all_acc = fold_written(
                ticket, gl.num_programs(1), all_m, all_lanes, all_acc, written, first_slot * ROWS,
                0, count, DIM, DIM, WRITTEN_FLOATS,
            )  # fmt: skip
            write_sums(sums, all_m, all_lanes, all_acc, own_rows, KV_HEADS, GROUP)
    else:
        write_sums(sums, m, lanes, acc, own_rows, KV_HEADS, GROUP)


def attention_prefix_fwd(call: ForwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 m [T, H], lanes [T, H, 8] and acc [T, H, D] after the shared keys; other rows' places
    are not written."""
    shared, plan, tables = call.tables.shared, call.plan.shared, call.tables
    assert shared is not None and plan is not None
    rows, heads, dim = call.q.shape
    m, lanes, acc = (
        torch.empty(rows, heads, *shape, dtype=torch.float32, device=call.q.device)
        for shape in ((), (8,), (dim,))
    )
    grid = shared.runs.shape[0] * plan.tiles * call.kv_heads
    written, tickets = (call.lse, call.lse, call.lse), shared.runs
    if plan.programs > 1:
        # One for each tile and KV head, zeros before and after. Only tiles of 16 rows are split.
        tickets = call.layout.tickets(call.q.device, grid)
        written = call.memory_of_blocks(grid, plan.schedule.rows)
    attention_prefix_kernel[(grid, plan.programs)](
        call.q, call.k, call.v, m, lanes, acc, *written, tickets, shared.runs, *call.numbers[:2],
        tables.block_table, call.factor, tables.block_table.shape[1], call.plan.most_blocks,
        *call.operand_strides, KV_HEADS=call.kv_heads, GROUP=call.group, ROWS=plan.schedule.rows,
        TILES=plan.tiles, DIM=dim, BLOCK=call.block_size, SPLIT=plan.programs > 1,
        RING=plan.schedule.ring, num_warps=WARPS.value,
        maxnreg=min(REGISTERS // plan.schedule.resident, 255), launch_pdl=True, **OPTIONS,
    )  # fmt: skip
    return m, lanes, acc
