"""Decode on sm_90: few queries of each sequence, keys in a paged cache.

A program copies keys and values through a ring of shared buffers, several copies ahead of its
matrix steps. The bits are those of `forward_triton`. Where programs share a tile, they write every
block to memory; then the last program folds all blocks in order (`decode_fold`), or several fold a
slice of the columns each.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.attention.hopper.decode_copies import (
    copy_keys,
    entries_of,
    prefetch_keys,
)
from rl_consistency.kernels.attention.hopper.decode_fold import (
    all_written,
    finite,
    first_sums,
    floats_for,
    fold_block,
    fold_written,
    folded_layout,
    write_block,
)
from rl_consistency.kernels.attention.hopper.head_parts import buffer_at, parts_of, row_buffers
from rl_consistency.kernels.attention.hopper.tiles import (
    LANES,
    NEG_INF,
    OPTIONS,
    WARPS,
    finish_rows,
    halve,
    places_of,
    stored_layout,
    thread_barrier,
    write_columns,
    write_lse,
    write_rows,
)
from rl_consistency.kernels.attention.schedules import PER_CALL, Cut
from rl_consistency.kernels.attention.tiles_triton import ForwardCall

ROWS = gl.constexpr(16)
REGISTERS = 504
"""Registers of a multiprocessor per thread of one program, for all resident programs together."""


@gluon.jit
def _load_part(
    Q, at, inside, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, HEAD_DIM: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [WARPS, 1], [1, 0]
    )
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    dim = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, wide))
    pointer = Q + gl.expand_dims(gl.convert_layout(at, rows), 1) + gl.expand_dims(dim, 0)
    mask = gl.expand_dims(gl.convert_layout(inside, rows), 1) & gl.expand_dims(dim < HEAD_DIM, 0)
    q = gl.load(pointer, mask=mask, other=0.0)
    return gl.convert_layout(q, gl.DotOperandLayout(0, S, 2))


@gluon.jit
def load_queries(
    Q, at, inside, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Queries [R, DIM] of rows at offsets `at` [R], zeros where not `inside` [R], as operands."""
    PARTS: gl.constexpr = parts_of(DIM)
    found = ()
    for i in gl.static_range(len(PARTS)):
        found = found + (_load_part(Q, at, inside, PARTS[i][0], PARTS[i][1], HEAD_DIM, S),)
    return found


@gluon.jit
def block_scores(q, key_bufs, S: gl.constexpr):
    """Scores [R, KEYS] of a block, one chain over all columns."""
    scores = gl.full([q[0].shape[0], key_bufs[0].shape[0]], 0.0, gl.float32, S)
    for i in gl.static_range(len(q)):
        keys = key_bufs[i].permute([1, 0]).load(gl.DotOperandLayout(1, S, 2))
        scores = mma_v2(q[i], keys, scores)
    return scores


@gluon.jit
def block_product(p, value_bufs, S: gl.constexpr):
    """p [R, KEYS] by the values of a block."""
    found = ()
    for i in gl.static_range(len(value_bufs)):
        values = value_bufs[i].load(gl.DotOperandLayout(1, S, 2))
        zeros = gl.full([p.shape[0], value_bufs[i].shape[1]], 0.0, gl.float32, S)
        found = found + (mma_v2(p, values, zeros),)
    return found


@gluon.jit
def exponentials(scores, factor, R: gl.constexpr, ACROSS: gl.constexpr, LANES: gl.constexpr):
    """(m in log2 units [R], p [R, KEYS], its eight lanes) of one block's scores.

    ACROSS warps lie side by side in the layout of the scores and in LANES.
    """
    m = gl.max(scores, axis=1) * factor
    shift = gl.expand_dims(-finite(m), 1) + gl.zeros_like(scores)
    p = gl.exp2(gl.fma(scores, factor + gl.zeros_like(scores), shift))
    # Some levels of the tree lie within a thread's registers; in LANES the others do.
    part = p
    if p.shape[1] == 128:
        part = halve(part, R, 128)
    part = halve(part, R, 64)
    if ACROSS == 4:
        part = halve(halve(gl.convert_layout(part, LANES), R, 32), R, 16)
    elif ACROSS == 2:
        part = halve(gl.convert_layout(halve(part, R, 32), LANES), R, 16)
    else:
        part = halve(halve(part, R, 32), R, 16)
    return m, p, gl.convert_layout(part, LANES)


@gluon.jit
def _probabilities(
    q, key_bufs, position, start, window, factor, S: gl.constexpr, LANES: gl.constexpr
):
    """(m in log2 units [ROWS], p [ROWS, KEYS], its eight lanes) of one block."""
    KEYS: gl.constexpr = key_bufs[0].shape[0]
    scores = block_scores(q, key_bufs, S)
    key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    distance = gl.expand_dims(position, 1) - gl.expand_dims(key, 0)
    scores = gl.where((distance >= 0) & (distance < window), scores, NEG_INF)
    return exponentials(scores, factor, ROWS, WARPS, LANES)


@gluon.jit
def _write_results(
    OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh, stride_lse,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """o and lse of a tile's rows, first .. of a sequence; see `write_rows`."""
    PARTS: gl.constexpr = parts_of(DIM)
    out, lse = finish_rows(m, lanes, acc, LANES)
    for i in gl.static_range(len(out)):
        places = places_of(
            out[i], first, kv_head, start_row, q_len, GROUP, stored_layout(PARTS[i][1])
        )
        write_columns(
            OUT + PARTS[i][0], out[i], places, stride_ot, stride_oh, HEAD_DIM - PARTS[i][0],
            stored_layout(PARTS[i][1]),
        )  # fmt: skip
        if i == 0:
            write_lse(LSE, lse, places, stride_lse, stored_layout(PARTS[i][1]))


@gluon.jit
def place_of(whole, divided, WHOLE: gl.constexpr, SPLIT: gl.constexpr):
    """(tile, number of this program among the tile's, their number) by a `Cut`."""
    number = gl.program_id(0)
    part, parts = number * 0, number * 0 + 1
    if SPLIT:
        turn, dealt = number - whole, gl.num_programs(0) - whole
        among = turn % divided
        if WHOLE:
            shared = turn >= 0
            number = gl.where(shared, whole + among, number)
            part = gl.where(shared, turn // divided, part)
            parts = gl.where(shared, dealt // divided + (among < dealt % divided), parts)
        else:
            number = among
            part = turn // divided
            parts = dealt // divided + (among < dealt % divided)
    return number, part, parts


@gluon.jit(do_not_specialize=PER_CALL)
def attention_decode_kernel(
    Q, K, V, OUT, LSE, block_m, block_lanes, block_acc, tickets, tiles, query_start, query_len,
    context_len, tables, shared_keys, sum_m, sum_lanes, sum_acc, window, factor, num_blocks, slots,
    whole, divided, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot,
    stride_oh, stride_lse, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, STORED: gl.constexpr,
    KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, FOLDED: gl.constexpr,
    BLOCK: gl.constexpr, WINDOWED: gl.constexpr, SHARED: gl.constexpr, WHOLE: gl.constexpr,
    SPLIT: gl.constexpr, RING: gl.constexpr, SLICES: gl.constexpr, FLOATS: gl.constexpr,
    SETTLED: gl.constexpr,
):  # fmt: skip
    """o [T, H, HEAD_DIM] and lse [T, H] of one tile of ROWS rows of one KV head, over blocks of
    KEYS keys. Columns from HEAD_DIM to DIM are zeros, which change no sum.

    Grid: the programs of a `Cut`, of `whole` tiles and `divided` ones, each counted once per KV
    head; WHOLE and SPLIT say whether there are such tiles.
    Carried over blocks of a whole tile: m [ROWS], lanes [ROWS, 8] and acc [ROWS, DIM]. Each block
    of a divided one is written to block_m, block_lanes and block_acc instead. With SHARED the fold
    goes on from the sums of the blocks that lie within the sequence's first shared_keys keys.
    """
    # The launch overlaps the end of the kernel ahead. Tables that this may still write are read
    # once it is done, and the next kernel starts no sooner.
    if not SETTLED:
        gdc_wait()
        gdc_launch_dependents()
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    rows: gl.constexpr = gl.SliceLayout(1, S)
    lane_layout: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, WARPS], [1, 0])
    lane_rows: gl.constexpr = gl.SliceLayout(1, lane_layout)
    PARTS: gl.constexpr = parts_of(DIM)
    ring = row_buffers(K.dtype.element_ty, RING, KEYS, DIM)
    number, part, parts = place_of(whole, divided, WHOLE, SPLIT)
    alone = gl.program_id(0) < whole
    kv_head = number % KV_HEADS
    tile = tiles + 2 * (number // KV_HEADS)
    sequence = gl.load(tile)
    first_row = gl.load(tile + 1)
    q_len = gl.load(query_len + sequence)
    limit = gl.load(context_len + sequence)
    start_row = gl.load(query_start + sequence)
    table = tables + sequence.to(gl.int64) * num_blocks
    past = limit - q_len
    low = limit * 0
    if WINDOWED:
        low = gl.maximum(past + first_row // GROUP - window + 1, 0) // KEYS * KEYS
    folded = q_len * 0
    if SHARED:
        low = gl.load(shared_keys + sequence) // KEYS * KEYS
        folded = gl.where(low > 0, q_len * GROUP, 0)
    last_position = gl.minimum(past + (first_row + ROWS - 1) // GROUP, limit - 1)
    tile_count = gl.maximum(gl.cdiv(last_position + 1 - low, KEYS), 0)
    # A captured launch has one grid for all lengths: each program takes its share of blocks here.
    share = gl.cdiv(tile_count, parts) * KEYS
    begin = low + part * share
    end = gl.minimum(begin + share, last_position + 1)
    count = gl.maximum(gl.cdiv(end - begin, KEYS), 0)

    # The ring holds K, V, K, V ... The block at `fill` is copied next, RING - 1 buffers ahead;
    # `entries` says where it lies, `coming` where the next one does.
    k_base = K + kv_head * stride_kh
    v_base = V + kv_head * stride_vh
    fill = begin
    entries = entries_of(table, fill, limit, BLOCK, KEYS)
    coming = entries_of(table, fill + KEYS, limit, BLOCK, KEYS)
    if SETTLED:
        if count > 0:
            prefetch_keys(k_base, entries, fill, stride_kt, BLOCK, HEAD_DIM)
            prefetch_keys(v_base, entries, fill, stride_vt, BLOCK, HEAD_DIM)
        gdc_wait()
        gdc_launch_dependents()
    for j in gl.static_range(RING - 1):
        base, stride = (k_base, stride_kt) if j % 2 == 0 else (v_base, stride_vt)
        copy_keys(buffer_at(ring, j), base, entries, fill, end, limit, stride, BLOCK, HEAD_DIM, DIM)
        if j % 2 == 1:
            fill += KEYS
            entries = coming
            coming = entries_of(table, fill + KEYS, limit, BLOCK, KEYS)

    row = first_row + gl.arange(0, ROWS, layout=rows)
    at = (start_row + row // GROUP).to(gl.int64) * stride_qt
    at += (kv_head * GROUP + row % GROUP) * stride_qh
    q = load_queries(Q, at, row < q_len * GROUP, HEAD_DIM, DIM, S)
    position = past + row // GROUP
    head_row = start_row * (KV_HEADS * GROUP) + kv_head * GROUP
    m, lanes, acc = first_sums(
        sum_m, sum_lanes, sum_acc, head_row, first_row, 0, folded, ROWS, PARTS[0][1], DIM, KV_HEADS,
        GROUP, SHARED and WHOLE, lane_layout, S,
    )  # fmt: skip
    # Only heads of one part, of 64 or 128 columns, read keys once that sequences share.
    acc = (acc,)
    for j in gl.static_range(1, len(PARTS)):
        acc = acc + (gl.full([ROWS, PARTS[j][1]], 0.0, gl.float32, S),)
    lane_m = gl.convert_layout(m, lane_rows)
    first_slot = (number - whole).to(gl.int64) * slots
    for i in range(count):
        start = begin + i * KEYS
        # Once all threads have waited, the buffer behind the awaited one is free.
        async_copy.wait_group(RING - 2)
        thread_barrier()
        if RING % 2 == 1:
            copy_keys(buffer_at(ring, (2 * i + RING - 1) % RING), k_base, entries, fill, end, limit,
                  stride_kt, BLOCK, HEAD_DIM, DIM)  # fmt: skip
        else:
            copy_keys(buffer_at(ring, (2 * i + RING - 1) % RING), v_base, entries, fill, end, limit,
                  stride_vt, BLOCK, HEAD_DIM, DIM)  # fmt: skip
            fill += KEYS
            entries = coming
            coming = entries_of(table, fill + KEYS, limit, BLOCK, KEYS)
        block_max, p, part_lanes = _probabilities(
            q, buffer_at(ring, 2 * i % RING), position, start, window, factor, S, lane_layout
        )
        rounded = gl.convert_layout(p.to(V.dtype.element_ty), gl.DotOperandLayout(0, S, 2))
        async_copy.wait_group(RING - 2)
        thread_barrier()
        if RING % 2 == 1:
            copy_keys(buffer_at(ring, (2 * i + RING) % RING), v_base, entries, fill, end, limit,
                  stride_vt, BLOCK, HEAD_DIM, DIM)  # fmt: skip
            fill += KEYS
            entries = coming
            coming = entries_of(table, fill + KEYS, limit, BLOCK, KEYS)
        else:
            copy_keys(buffer_at(ring, (2 * i + RING) % RING), k_base, entries, fill, end, limit,
                  stride_kt, BLOCK, HEAD_DIM, DIM)  # fmt: skip
        product = block_product(rounded, buffer_at(ring, (2 * i + 1) % RING), S)
        if WHOLE and (not SPLIT or alone):
            m, lane_m, lanes, acc = fold_block(
                m, lane_m, lanes, acc, block_max, part_lanes, product
            )
        else:
            write_block(
                block_m, block_lanes, block_acc, first_slot + (start - low) // KEYS, block_max,
                part_lanes, product, ROWS, STORED, DIM, FOLDED,
            )  # fmt: skip
    async_copy.wait_group(0)
    if WHOLE and (not SPLIT or alone):
        _write_results(
            OUT, LSE, m, lanes, acc, first_row, kv_head, start_row, q_len, stride_ot, stride_oh,
            stride_lse, GROUP, HEAD_DIM, DIM,
        )  # fmt: skip
    else:
        # A program stores its blocks before it counts itself.
        thread_barrier()
        ticket = tickets + number - whole
        if all_written(ticket, part, parts, SLICES):
            WIDTH: gl.constexpr = FOLDED // SLICES
            # Every slice folds the lanes too, and writes the same lse.
            column = part * WIDTH if SLICES > 1 else 0
            place = first_slot * STORED
            all_m, all_lanes, all_acc = first_sums(
                sum_m, sum_lanes, sum_acc, head_row, first_row, column, folded, STORED, WIDTH,
                FOLDED, KV_HEADS, GROUP, SHARED, folded_layout(STORED, WIDTH, True),
                folded_layout(STORED, WIDTH, False),
            )  # fmt: skip
            all_m, all_lanes, all_acc = fold_written(
                ticket, parts, all_m, all_lanes, all_acc, block_m + place, block_lanes + place * 8,
                block_acc + place * FOLDED + column, tile_count, HEAD_DIM - column, STORED, WIDTH,
                FOLDED, FLOATS,
            )  # fmt: skip
            write_rows(
                OUT + column, LSE, all_m, all_lanes, all_acc, first_row, kv_head, start_row,
                q_len, stride_ot, stride_oh, stride_lse, HEAD_DIM - column, GROUP,
                stored_layout(WIDTH), LANES,
            )  # fmt: skip


def attention_decode_fwd(
    call: ForwardCall, cut: Cut, sums: tuple[torch.Tensor, ...] | None
) -> None:
    """Fill o and lse for tiles of 16 rows, whose key blocks a cut deals to programs.

    `plan.slices` programs of a tile, a power of two up to D / 8 and to every tile's programs, fold
    D / slices columns each; the driver refuses more than one if the launch does not fit the device
    at once. `sums` are those of the keys that `decode_prefix` has read, None where it was not
    called.
    """
    plan, lse, tiles, tables = call.plan, call.lse, call.tiles, call.tables
    divided = plan.divided
    # Where no tile is divided no block is written, and without sums none is read: any pointers do.
    written, tickets = (lse, lse, lse), tiles
    if divided:
        # One for each divided tile, zeros before and after.
        tickets = call.layout.tickets(call.q.device, divided)
        written = call.memory_of_blocks(divided, plan.stored)
    shared = (tiles, lse, lse, lse)
    if sums is not None and tables.shared is not None:
        shared = (tables.shared.keys, *sums)
    schedule = plan.schedule
    attention_decode_kernel[(cut.programs,)](
        call.q, call.k, call.v, call.out, lse, *written, tickets, tiles, *call.numbers,
        tables.block_table, *shared, call.reach, call.factor, tables.block_table.shape[1],
        plan.most_blocks, cut.whole, divided, *call.operand_strides, *call.result_strides,
        KV_HEADS=call.kv_heads, GROUP=call.group, STORED=plan.stored, KEYS=plan.keys,
        HEAD_DIM=call.head_dim, DIM=plan.columns, FOLDED=plan.columns, BLOCK=call.block_size,
        WINDOWED=call.windowed, SHARED=sums is not None, WHOLE=cut.whole > 0, SPLIT=divided > 0,
        RING=schedule.ring, SLICES=plan.slices, FLOATS=floats_for(schedule.resident),
        SETTLED=call.layout.settled, num_warps=WARPS.value,
        maxnreg=min(REGISTERS // schedule.resident, 255), launch_pdl=True,
        launch_cooperative_grid=plan.slices > 1, **OPTIONS,
    )  # fmt: skip
