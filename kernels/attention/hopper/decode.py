"""Decode on sm_90: few queries of each sequence, keys in a paged cache.

A program copies keys and values through a ring of shared buffers, several copies ahead of its
matrix steps. The bits are those of `forward_triton`.

Where programs share a tile, they write every block to memory; then the last program folds all
blocks in order, or several fold a slice of the columns each. The fold is a left one: each block's
sums are scaled to the running maximum and added, first to last. Columns are independent. Written
blocks pass through a ring of shared buffers, copied two ahead of the fold.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.attention.hopper.tiles import (
    LANES,
    NEG_INF,
    OPTIONS,
    WARPS,
    halve,
    stored_layout,
    thread_barrier,
    write_rows,
)
from rl_consistency.kernels.attention.schedules import PER_CALL, Cut
from rl_consistency.kernels.attention.tiles_triton import ForwardCall
from rl_consistency.kernels.core.prefetch import LINE, prefetch_lines

ROWS = gl.constexpr(16)
REGISTERS = 504
"""Registers of a multiprocessor per thread of one program, for all resident programs together."""
BUFFERS = gl.constexpr(3)
"""Buffers of the fold's ring; the code below is written for three."""
WRITTEN_FLOATS = gl.constexpr(9216)
"""Most numbers of written blocks in one buffer, where a multiprocessor holds two programs."""
FEW_FLOATS = gl.constexpr(4608)
"""Most numbers of written blocks in one buffer, where a multiprocessor holds three programs."""
MOST_BLOCKS = gl.constexpr(128)
"""Most blocks in one buffer."""


@gluon.jit
def entries_of(table, start, limit, BLOCK: gl.constexpr, KEYS: gl.constexpr):
    """Physical blocks [KEYS] of the keys from `start`, one a thread."""
    key = start + gl.arange(0, KEYS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.load(table + key // BLOCK, mask=key < limit, other=0)


@gluon.constexpr_function
def keys_layout(keys, columns):
    """Copies of 16 bytes: a thread's rows mostly lie in one cache block, their copies in distinct
    banks."""
    each = min(8, keys * columns // 1024)
    return gl.BlockedLayout([each, 8], [256 // columns, columns // 8], [WARPS.value, 1], [1, 0])


@gluon.jit
def _copy_rows(
    buffer, base, entries, start, limit, stride_row, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Start copying keys or values into a buffer [KEYS, columns]."""
    KEYS: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = keys_layout(KEYS, COLUMNS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    key = start + gl.arange(0, KEYS, layout=rows)
    dim = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    row = gl.convert_layout(entries, rows).to(gl.int64) * BLOCK + key % BLOCK
    pointer = base + gl.expand_dims(row * stride_row, 1) + gl.expand_dims(dim, 0)
    inside = gl.expand_dims(key < limit, 1) & gl.expand_dims(dim < HEAD_DIM, 0)
    async_copy.async_copy_global_to_shared(buffer, pointer, mask=inside)


@gluon.jit
def prefetch_keys(base, entries, start, stride_row, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Ask for the keys or values from `start` in the L2 cache.

    `entries` [KEYS] say where they lie. A key past the sequence's end is asked for in block 0.
    """
    ELEMENTS: gl.constexpr = LINE * 8 // base.dtype.element_ty.primitive_bitwidth
    key = start + gl.arange(0, entries.shape[0], layout=entries.type.layout)
    row = entries.to(gl.int64) * BLOCK + key % BLOCK
    for column in gl.static_range(0, HEAD_DIM, ELEMENTS):
        prefetch_lines(base + row * stride_row + column)


@gluon.jit
def block_at(start, pages, BLOCK: gl.constexpr, KEYS: gl.constexpr):
    """The block of keys at `start` as `copy_next` takes it: its start, its entries, and those of
    the block behind it."""
    table, limit = pages[4], pages[6]
    entries = entries_of(table, start, limit, BLOCK, KEYS)
    return start, entries, entries_of(table, start + KEYS, limit, BLOCK, KEYS)


@gluon.jit
def copy_next(
    buffer, VALUES: gl.constexpr, following, pages, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Start copying the keys of the block that follows, or its values and go on to the next one, as
    one group, zeros past HEAD_DIM. Returns the block that then follows.

    `pages`: keys, values, the distance of two rows of each, the table, where this program's keys
    end, and where those of the sequence do; past that are zeros.
    """
    k_base, v_base, stride_kt, stride_vt, table, end, limit = pages
    start, entries, coming = following
    base, stride = (v_base, stride_vt) if VALUES else (k_base, stride_kt)
    if start < end:
        _copy_rows(buffer, base, entries, start, limit, stride, BLOCK, HEAD_DIM)
    async_copy.commit_group()
    if VALUES:
        KEYS: gl.constexpr = buffer.shape[0]
        start += KEYS
        entries = coming
        coming = entries_of(table, start + KEYS, limit, BLOCK, KEYS)
    return start, entries, coming


@gluon.constexpr_function
def rows_layout(columns):
    """Rows of so many 16-bit columns in shared memory: 16 bytes of eight rows in distinct banks."""
    pieces = min(columns // 8, 8)
    return gl.SwizzledSharedLayout(8, 8 // pieces, pieces, [1, 0])


@gluon.jit
def row_buffers(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """COUNT buffers [ROWS, DIM] in shared memory for the warps' own matrix steps."""
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, DIM], rows_layout(DIM))


@gluon.jit
def load_queries(
    Q, row, start_row, queries, kv_head, stride_qt, stride_qh, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """[R, DIM] of rows [R] of a KV head, zeros past the last of the queries, as operands."""
    at = (start_row + row // GROUP).to(gl.int64) * stride_qt
    at += (kv_head * GROUP + row % GROUP) * stride_qh
    inside = row < queries * GROUP
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    pointer = Q + gl.expand_dims(gl.convert_layout(at, rows), 1) + gl.expand_dims(dim, 0)
    mask = gl.expand_dims(gl.convert_layout(inside, rows), 1) & gl.expand_dims(dim < HEAD_DIM, 0)
    q = gl.load(pointer, mask=mask, other=0.0)
    return gl.convert_layout(q, gl.DotOperandLayout(0, S, 2))


@gluon.jit
def block_scores(q, keys, S: gl.constexpr):
    """Scores [R, KEYS] of a block, one chain over all columns."""
    scores = gl.full([q.shape[0], keys.shape[0]], 0.0, gl.float32, S)
    return mma_v2(q, keys.permute([1, 0]).load(gl.DotOperandLayout(1, S, 2)), scores)


@gluon.jit
def block_product(p, values, S: gl.constexpr):
    """p [R, KEYS] by the values of a block."""
    zeros = gl.full([p.shape[0], values.shape[1]], 0.0, gl.float32, S)
    return mma_v2(p, values.load(gl.DotOperandLayout(1, S, 2)), zeros)


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
def _probabilities(q, keys, position, start, window, factor, S: gl.constexpr, LANES: gl.constexpr):
    """(m in log2 units [ROWS], p [ROWS, KEYS], its eight lanes) of one block."""
    KEYS: gl.constexpr = keys.shape[0]
    scores = block_scores(q, keys, S)
    key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    distance = gl.expand_dims(position, 1) - gl.expand_dims(key, 0)
    scores = gl.where((distance >= 0) & (distance < window), scores, NEG_INF)
    return exponentials(scores, factor, ROWS, WARPS, LANES)


@gluon.constexpr_function
def folded_layout(rows, columns, lanes):
    """The layout of [rows, columns] sums, or of lanes with their rows in the same threads."""
    each = min(4, max(1, rows * columns // 128))
    threads = min(32, columns // each)
    across = max(1, columns // (threads * each))
    return gl.BlockedLayout(
        [1, 1 if lanes else each], [32 // threads, threads], [4 // across, across], [1, 0]
    )


@gluon.constexpr_function
def copied_layout(columns):
    """The layout in which [rows, columns] sums are copied, 16 bytes a thread."""
    threads = min(32, columns // 4)
    return gl.BlockedLayout([1, 4], [32 // threads, threads], [4, 1], [1, 0])


@gluon.constexpr_function
def blocks_at_once(rows, columns, floats):
    """Written blocks, with their lanes, that one buffer of so many numbers holds."""
    n = MOST_BLOCKS.value
    while n * rows * (columns + 8) > floats:
        n //= 2
    return n


def floats_for(resident: int) -> int:
    """Most numbers of written blocks in one buffer, by the programs of a multiprocessor."""
    return (FEW_FLOATS if resident > 2 else WRITTEN_FLOATS).value


def shared_bytes(rows: int, columns: int, resident: int) -> int:
    """Shared memory of a program's fold: its ring and the factors."""
    blocks = int(blocks_at_once(rows, columns, floats_for(resident)))
    return 4 * blocks * rows * (BUFFERS.value * (columns + 8) + 2)


@gluon.constexpr_function
def scanned_layout(n):
    """The layout of [n, rows] maxima: the blocks of a row in one warp."""
    threads = min(32, n)
    return gl.BlockedLayout([max(1, n // 32), 1], [threads, 32 // threads], [1, 4], [0, 1])


@gluon.jit
def finite(m):
    """m, or 0 for a row that has seen no key: -inf minus -inf would be NaN."""
    return gl.where(m == NEG_INF, 0.0, m)


@gluon.jit
def scaled(block, right, running, left):
    """block * right + running * left, each [R, C] by [R]."""
    right = gl.expand_dims(right, 1) + gl.zeros_like(block)
    return gl.fma(block, right, running * gl.expand_dims(left, 1))


@gluon.jit
def fold_block(m, lane_m, lanes, acc, block_max, block_lanes, block_acc):
    """(m, lane_m, lanes, acc) after one more block; lane_m is m in the layout of the lanes."""
    lane_rows: gl.constexpr = lane_m.type.layout
    new_m = gl.maximum(m, block_max)
    lane_max = gl.convert_layout(block_max, lane_rows)
    new_lane_m = gl.maximum(lane_m, lane_max)
    shift, lane_shift = finite(new_m), finite(new_lane_m)
    lanes = scaled(block_lanes, gl.exp2(lane_max - lane_shift), lanes, gl.exp2(lane_m - lane_shift))
    right, left = gl.exp2(block_max - shift), gl.exp2(m - shift)
    return new_m, new_lane_m, lanes, scaled(block_acc, right, acc, left)


@gluon.jit
def write_block(written, block, m, lanes, acc, STORED: gl.constexpr):
    """Write the first STORED rows of one block's m [ROWS], lanes [ROWS, 8] and acc [ROWS, DIM]."""
    block_m, block_lanes, block_acc = written
    DIM: gl.constexpr = acc.shape[1]
    lane_layout: gl.constexpr = lanes.type.layout
    place = block * STORED
    lane_row = gl.arange(0, lanes.shape[0], layout=gl.SliceLayout(1, lane_layout))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, lane_layout))
    at = gl.expand_dims((place + lane_row) * 8, 1) + gl.expand_dims(lane, 0)
    kept = gl.expand_dims(lane_row < STORED, 1) & gl.expand_dims(lane < 8, 0)
    gl.store(block_lanes + at, lanes, mask=kept)
    # acc and m have one layout of rows.
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    at = gl.expand_dims((place + row) * DIM, 1) + gl.expand_dims(dim, 0)
    kept = gl.expand_dims(row < STORED, 1) & gl.expand_dims(dim < DIM, 0)
    gl.store(block_acc + at, acc, mask=kept)
    gl.store(block_m + place + row, m, mask=row < STORED)


@gluon.jit
def _sums_at(
    rows, column, R: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(places [R] of R rows, those of query t and head h at t * heads + h; which exist; offsets
    [R, WIDTH from `column`] of the DIM sums of each; which exist).

    `rows`: the place of the first query's row at the first head of the group; the first row; the
    row that ends them.
    """
    head_row, first_row, end = rows
    row = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    place = head_row.to(gl.int64) + row // GROUP * (KV_HEADS * GROUP) + row % GROUP
    at = gl.expand_dims(place * DIM, 1) + gl.expand_dims(column + dim, 0)
    kept = gl.expand_dims(row < end, 1) & gl.expand_dims(dim < WIDTH, 0)
    return place, row < end, at, kept


@gluon.jit
def first_sums(
    sums, rows, column, R: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, lane_layout: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """(m [R], lanes [R, 8], acc [R, WIDTH from `column`]) that a fold begins with.

    m = -inf and zeros; with SHARED, in rows before their end, what `write_sums` has left.
    """
    if SHARED:
        place, known, at, kept = _sums_at(rows, column, R, WIDTH, DIM, KV_HEADS, GROUP, layout)
        _, _, lanes_at, lanes_kept = _sums_at(rows, 0, R, 8, 8, KV_HEADS, GROUP, lane_layout)
        m = gl.load(sums[0] + place, known, NEG_INF, cache_modifier=".cg")
        lanes = gl.load(sums[1] + lanes_at, lanes_kept, 0.0, cache_modifier=".cg")
        acc = gl.load(sums[2] + at, kept, 0.0, cache_modifier=".cg")
    else:
        m = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        lanes = gl.zeros([R, 8], gl.float32, lane_layout)
        acc = gl.zeros([R, WIDTH], gl.float32, layout)
    return m, lanes, acc


@gluon.jit
def write_sums(sums, m, lanes, acc, rows, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Write m [R], lanes [R, 8] and acc [R, DIM] of rows before their end, for `first_sums`."""
    R: gl.constexpr = acc.shape[0]
    DIM: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    place, known, at, kept = _sums_at(rows, 0, R, DIM, DIM, KV_HEADS, GROUP, layout)
    added: gl.constexpr = lanes.type.layout
    _, _, lanes_at, lanes_kept = _sums_at(rows, 0, R, 8, 8, KV_HEADS, GROUP, added)
    gl.store(sums[1] + lanes_at, lanes, mask=lanes_kept)
    gl.store(sums[2] + at, acc, mask=kept)
    gl.store(sums[0] + place, gl.convert_layout(m, gl.SliceLayout(1, layout)), mask=known)


@gluon.jit
def all_written(ticket, part, parts, SLICES: gl.constexpr):
    """Count program `part` of the tile's `parts`, which has written its blocks, in the tile's
    ticket; whether it folds.

    With one slice the last program folds. Otherwise the first SLICES programs do, after waiting for
    all: the tile's programs must run at the same time.
    """
    if SLICES == 1:
        folds = gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == parts - 1
    else:
        gl.atomic_add(ticket, 1, sem="release", scope="gpu")
        folds = part < SLICES
        if folds:
            gl.inline_asm_elementwise(
                """{
                .reg .pred missing;
                again:
                ld.acquire.gpu.global.s32 $0, [$1];
                setp.lt.s32 missing, $0, $2;
                @missing bra again;
                }""",
                "=&r,l,r", [ticket, parts], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    # No thread goes on before all have seen the count.
    thread_barrier()
    return folds


@gluon.jit
def _leave(ticket, parts, SLICES: gl.constexpr):
    """Count this program again; the last one that folds sets the ticket back to 0."""
    if SLICES == 1:
        gl.store(ticket, 0)
    else:
        if gl.atomic_add(ticket, 1, sem="relaxed", scope="gpu") == parts + SLICES - 1:
            gl.store(ticket, 0)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _copy(
    acc_buffer, lanes_buffer, block_acc, block_lanes, first, count, columns,
    STORED: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Start copying written blocks from `first`, as many as the buffers hold, zeros from `count`
    and from `columns` on, as one group."""
    # Copies of 16 bytes bypass the first-level cache, which may be stale.
    ROWS: gl.constexpr = acc_buffer.shape[0]
    WIDTH: gl.constexpr = acc_buffer.shape[1]
    layout: gl.constexpr = copied_layout(WIDTH)
    row = first * STORED + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(row < count * STORED, 1) & gl.expand_dims(column < columns, 0)
    pointer = block_acc + gl.expand_dims(row * DIM, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(acc_buffer, pointer, mask=inside)
    lane_layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [WARPS, 1], [1, 0])
    lane_row = first * STORED + gl.arange(0, ROWS, layout=gl.SliceLayout(1, lane_layout))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, lane_layout))
    inside = gl.expand_dims(lane_row < count * STORED, 1) & gl.expand_dims(lane < 8, 0)
    pointer = block_lanes + gl.expand_dims(lane_row * 8, 1) + gl.expand_dims(lane, 0)
    async_copy.async_copy_global_to_shared(lanes_buffer, pointer, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _maxima(block_m, first, count, STORED: gl.constexpr, N: gl.constexpr):
    """Maxima [N, STORED] of the blocks from `first`, and of the block before each."""
    layout: gl.constexpr = scanned_layout(N)
    block = first + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, STORED, layout=gl.SliceLayout(0, layout))
    at = gl.expand_dims(block * STORED, 1) + gl.expand_dims(row, 0)
    every = gl.expand_dims(row < STORED, 0)
    known = gl.expand_dims(block < count, 1) & every
    maxima = gl.load(block_m + at, known, NEG_INF, cache_modifier=".cg")
    # The first place past the end needs the last block's maximum too: without it, a row that only
    # this block has seen would be scaled to zero.
    known = gl.expand_dims((block > 0) & (block <= count), 1) & every
    before = gl.load(block_m + at - STORED, known, NEG_INF, cache_modifier=".cg")
    return maxima, before


@gluon.jit
def _fold_some(lanes, acc, lanes_of, acc_of, left_of, right_of, block, place, STEP: gl.constexpr):
    """(lanes, acc) after STEP written blocks: in the ring from `place`, their factors from `block`.

    A function of its own: Triton's front end takes each once, but a loop's body twice, so that of
    a loop in a loop four times.
    """
    layout: gl.constexpr = acc.type.layout
    lane_layout: gl.constexpr = lanes.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    lane_rows: gl.constexpr = gl.SliceLayout(1, lane_layout)
    for j in gl.static_range(STEP):
        a, b = left_of.index(block + j).load(rows), right_of.index(block + j).load(rows)
        acc = scaled(acc_of.index(place + j).load(layout), b, acc, a)
        a = left_of.index(block + j).load(lane_rows)
        b = right_of.index(block + j).load(lane_rows)
        lanes = scaled(lanes_of.index(place + j).load(lane_layout), b, lanes, a)
    return lanes, acc


@gluon.jit
def fold_written(
    ticket, parts, m, lanes, acc, written, place, column, count, columns, DIM: gl.constexpr,
    FLOATS: gl.constexpr,
):  # fmt: skip
    """(m, lanes, acc), as `first_sums` gives them, after a tile's `count` written blocks, in order,
    which begin at row `place`. `columns` of acc were written, from its first one, `column`, on.

    Each of the programs that fold DIM columns calls it after `all_written`.
    """
    STORED: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    block_m, block_lanes = written[0] + place, written[1] + place * 8
    block_acc = written[2] + place * DIM + column
    N: gl.constexpr = blocks_at_once(STORED, WIDTH, FLOATS)
    STEP: gl.constexpr = min(N, 16)
    rows: gl.constexpr = gl.SliceLayout(1, folded_layout(STORED, WIDTH, False))
    scanned: gl.constexpr = scanned_layout(N)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc_ring = gl.allocate_shared_memory(gl.float32, [BUFFERS, N * STORED, WIDTH], flat)
    lanes_ring = gl.allocate_shared_memory(gl.float32, [BUFFERS, N * STORED, 8], flat)
    factors = gl.allocate_shared_memory(gl.float32, [2, N, STORED], flat)
    left_of = factors.index(0)._reinterpret(gl.float32, [N, STORED], line)
    right_of = factors.index(1)._reinterpret(gl.float32, [N, STORED], line)
    acc_of = acc_ring._reinterpret(gl.float32, [BUFFERS * N, STORED, WIDTH], flat)
    lanes_of = lanes_ring._reinterpret(gl.float32, [BUFFERS * N, STORED, 8], flat)
    for j in gl.static_range(2):
        _copy(acc_ring.index(j), lanes_ring.index(j), block_acc, block_lanes, j * N, count,
              columns, STORED, DIM)  # fmt: skip
    maxima, before = _maxima(block_m, 0, count, STORED, N)
    _leave(ticket, parts, DIM // WIDTH)
    m = gl.convert_layout(m, gl.SliceLayout(0, scanned))
    slot = count * 0
    for first in range(0, count, N):
        # After this barrier the factors and the buffer behind the awaited one are free.
        async_copy.wait_group(1)
        thread_barrier()
        ahead = gl.where(slot == 0, 2, slot - 1)
        _copy(acc_ring.index(ahead), lanes_ring.index(ahead), block_acc, block_lanes,
              first + 2 * N, count, columns, STORED, DIM)  # fmt: skip
        # A running maximum is exact in any order, so all N factors are computed at once.
        running = gl.associative_scan(before, 0, _larger)
        running = gl.maximum(running, gl.expand_dims(m, 0) + gl.zeros_like(running))
        shift = finite(gl.maximum(running, maxima))
        factors.index(0).store(gl.exp2(running - shift))
        factors.index(1).store(gl.exp2(maxima - shift))
        m = gl.maximum(m, gl.max(maxima, 0))
        maxima, before = _maxima(block_m, first + N, count, STORED, N)
        thread_barrier()
        # Past the last block the left factor is 1 and the summand is 0.
        for i in range(0, gl.minimum(count - first, N), STEP):
            lanes, acc = _fold_some(
                lanes, acc, lanes_of, acc_of, left_of, right_of, i, slot * N + i, STEP
            )
        slot = gl.where(slot == 2, 0, slot + 1)
    async_copy.wait_group(0)
    return gl.convert_layout(m, rows), lanes, acc


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
    KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
    WINDOWED: gl.constexpr, SHARED: gl.constexpr, WHOLE: gl.constexpr,
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

    # The ring holds K, V, K, V ..., copied RING - 1 buffers ahead.
    k_base = K + kv_head * stride_kh
    v_base = V + kv_head * stride_vh
    pages = (k_base, v_base, stride_kt, stride_vt, table, end, limit)
    following = block_at(begin, pages, BLOCK, KEYS)
    if SETTLED:
        if count > 0:
            prefetch_keys(k_base, following[1], begin, stride_kt, BLOCK, HEAD_DIM)
            prefetch_keys(v_base, following[1], begin, stride_vt, BLOCK, HEAD_DIM)
        gdc_wait()
        gdc_launch_dependents()
    for j in gl.static_range(RING - 1):
        following = copy_next(ring.index(j), j % 2 == 1, following, pages, BLOCK, HEAD_DIM)

    row = first_row + gl.arange(0, ROWS, layout=rows)
    q = load_queries(
        Q, row, start_row, q_len, kv_head, stride_qt, stride_qh, GROUP, HEAD_DIM, DIM, S
    )
    position = past + row // GROUP
    sums, written = (sum_m, sum_lanes, sum_acc), (block_m, block_lanes, block_acc)
    own_rows = (start_row * (KV_HEADS * GROUP) + kv_head * GROUP, first_row, folded)
    m, lanes, acc = first_sums(
        sums, own_rows, 0, ROWS, DIM, DIM, KV_HEADS, GROUP, SHARED and WHOLE, lane_layout, S
    )
    lane_m = gl.convert_layout(m, lane_rows)
    first_slot = (number - whole).to(gl.int64) * slots
    for i in range(count):
        start = begin + i * KEYS
        # Once all threads have waited, the buffer behind the awaited one is free.
        async_copy.wait_group(RING - 2)
        thread_barrier()
        buffer = ring.index((2 * i + RING - 1) % RING)
        following = copy_next(buffer, RING % 2 == 0, following, pages, BLOCK, HEAD_DIM)
        block_max, p, part_lanes = _probabilities(
            q, ring.index(2 * i % RING), position, start, window, factor, S, lane_layout
        )
        rounded = gl.convert_layout(p.to(V.dtype.element_ty), gl.DotOperandLayout(0, S, 2))
        async_copy.wait_group(RING - 2)
        thread_barrier()
        buffer = ring.index((2 * i + RING) % RING)
        following = copy_next(buffer, RING % 2 == 1, following, pages, BLOCK, HEAD_DIM)
        product = block_product(rounded, ring.index((2 * i + 1) % RING), S)
        if WHOLE and (not SPLIT or alone):
            m, lane_m, lanes, acc = fold_block(
                m, lane_m, lanes, acc, block_max, part_lanes, product
            )
        else:
            block = first_slot + (start - low) // KEYS
            write_block(written, block, block_max, part_lanes, product, STORED)
    async_copy.wait_group(0)
    rows_here, strides = (first_row, kv_head, start_row, q_len), (stride_ot, stride_oh, stride_lse)
    if WHOLE and (not SPLIT or alone):
        write_rows(
            (OUT, LSE), m, lanes, (acc,), rows_here, strides, HEAD_DIM, GROUP, ((0, DIM),),
            stored_layout, LANES,
        )  # fmt: skip
    else:
        # A program stores its blocks before it counts itself.
        thread_barrier()
        ticket = tickets + number - whole
        if all_written(ticket, part, parts, SLICES):
            WIDTH: gl.constexpr = DIM // SLICES
            # Every slice folds the lanes too, and writes the same lse.
            column = part * WIDTH if SLICES > 1 else 0
            all_m, all_lanes, all_acc = first_sums(
                sums, own_rows, column, STORED, WIDTH, DIM, KV_HEADS, GROUP, SHARED,
                folded_layout(STORED, WIDTH, True), folded_layout(STORED, WIDTH, False),
            )  # fmt: skip
            all_m, all_lanes, all_acc = fold_written(
                ticket, parts, all_m, all_lanes, all_acc, written, first_slot * STORED, column,
                tile_count, HEAD_DIM - column, DIM, FLOATS,
            )  # fmt: skip
            write_rows(
                (OUT + column, LSE), all_m, all_lanes, (all_acc,), rows_here, strides,
                HEAD_DIM - column, GROUP, ((0, WIDTH),), stored_layout, LANES,
            )  # fmt: skip


def attention_decode_fwd(
    call: ForwardCall, cut: Cut, sums: tuple[torch.Tensor, ...] | None
) -> None:
    """Fill o and lse for tiles of 16 rows, whose key blocks a cut deals to programs.

    `plan.slices` programs of a tile, a power of two up to D / 8 and to every tile's programs, fold
    D / slices columns each; the driver refuses more than one if the launch does not fit the device
    at once. `sums` are those of the keys that `shared_keys` has read, None where it was not
    called.
    """
    plan, lse, tiles, tables = call.plan, call.lse, call.tiles, call.tables
    divided = plan.tiles - cut.whole
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
        KV_HEADS=call.kv_heads, STORED=plan.stored, KEYS=plan.keys, DIM=plan.columns,
        BLOCK=call.block_size, SHARED=sums is not None, WHOLE=cut.whole > 0, SPLIT=divided > 0,
        RING=schedule.ring, SLICES=plan.slices, FLOATS=floats_for(schedule.resident),
        SETTLED=call.layout.settled, num_warps=WARPS.value,
        maxnreg=min(REGISTERS // schedule.resident, 255), launch_pdl=True,
        launch_cooperative_grid=plan.slices > 1, **call.shape, **OPTIONS,
    )  # fmt: skip
