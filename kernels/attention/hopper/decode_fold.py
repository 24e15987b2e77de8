"""The left fold over blocks of keys in `hopper/decode.py`: of blocks as they are computed, or of
blocks that several programs have written to memory.

Each block's sums are scaled to the running maximum and added, first to last. Columns are
independent, so one program may fold all of a tile or several a slice each. Written blocks pass
through a ring of shared buffers, copied two ahead of the fold.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rl_consistency.kernels.attention.hopper.head_parts import parts_of
from rl_consistency.kernels.attention.hopper.tiles import NEG_INF, WARPS, thread_barrier

BUFFERS = gl.constexpr(3)
"""Buffers of the fold's ring; the code below is written for three."""
WRITTEN_FLOATS = gl.constexpr(9216)
"""Most numbers of written blocks in one buffer, where a multiprocessor holds two programs."""
FEW_FLOATS = gl.constexpr(4608)
"""Most numbers of written blocks in one buffer, where a multiprocessor holds three programs."""
MOST_BLOCKS = gl.constexpr(128)
"""Most blocks in one buffer."""


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
    """(m, lane_m, lanes, acc) after one more block; lane_m is m in the layout of the lanes, acc has
    the columns in parts."""
    lane_rows: gl.constexpr = lane_m.type.layout
    new_m = gl.maximum(m, block_max)
    lane_max = gl.convert_layout(block_max, lane_rows)
    new_lane_m = gl.maximum(lane_m, lane_max)
    shift, lane_shift = finite(new_m), finite(new_lane_m)
    lanes = scaled(block_lanes, gl.exp2(lane_max - lane_shift), lanes, gl.exp2(lane_m - lane_shift))
    right, left = gl.exp2(block_max - shift), gl.exp2(m - shift)
    sums = ()
    for i in gl.static_range(len(acc)):
        sums = sums + (scaled(block_acc[i], right, acc[i], left),)
    return new_m, new_lane_m, lanes, sums


@gluon.jit
def write_block(
    block_m, block_lanes, block_acc, block, m, lanes, acc,
    ROWS: gl.constexpr, STORED: gl.constexpr, DIM: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """Write the first STORED rows of one block's m [ROWS], lanes [ROWS, 8] and acc [ROWS, DIM], in
    parts, to rows of FOLDED columns."""
    PARTS: gl.constexpr = parts_of(DIM)
    lane_layout: gl.constexpr = lanes.type.layout
    place = block * STORED
    lane_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, lane_layout))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, lane_layout))
    at = gl.expand_dims((place + lane_row) * 8, 1) + gl.expand_dims(lane, 0)
    kept = gl.expand_dims(lane_row < STORED, 1) & gl.expand_dims(lane < 8, 0)
    gl.store(block_lanes + at, lanes, mask=kept)
    # The parts of acc and m have one layout of rows.
    layout: gl.constexpr = acc[0].type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(len(acc)):
        dim = PARTS[i][0] + gl.arange(0, PARTS[i][1], layout=gl.SliceLayout(0, layout))
        at = gl.expand_dims((place + row) * FOLDED, 1) + gl.expand_dims(dim, 0)
        kept = gl.expand_dims(row < STORED, 1) & gl.expand_dims(dim < DIM, 0)
        gl.store(block_acc + at, acc[i], mask=kept)
    gl.store(block_m + place + row, m, mask=row < STORED)


@gluon.jit
def _places(head_row, row, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Where the sums of rows lie: those of query t and head h at t * heads + h.

    `head_row` is the place of row 0: the first query's, at the first head of the group.
    """
    return head_row.to(gl.int64) + row // GROUP * (KV_HEADS * GROUP) + row % GROUP


@gluon.jit
def first_sums(
    sum_m, sum_lanes, sum_acc, head_row, first_row, column, end, R: gl.constexpr,
    WIDTH: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    SHARED: gl.constexpr, lane_layout: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(m [R], lanes [R, 8], acc [R, WIDTH from `column`]) that a fold begins with.

    m = -inf and zeros; with SHARED, in rows before `end`, what `write_sums` has left.
    """
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if SHARED:
        row = first_row + gl.arange(0, R, layout=rows)
        dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        lane_row = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout))
        lane = gl.arange(0, 8, layout=gl.SliceLayout(0, lane_layout))
        place = _places(head_row, row, KV_HEADS, GROUP)
        lane_place = _places(head_row, lane_row, KV_HEADS, GROUP)
        m = gl.load(sum_m + place, row < end, NEG_INF, cache_modifier=".cg")
        at = gl.expand_dims(lane_place * 8, 1) + gl.expand_dims(lane, 0)
        inside = gl.expand_dims(lane_row < end, 1) & gl.expand_dims(lane < 8, 0)
        lanes = gl.load(sum_lanes + at, inside, 0.0, cache_modifier=".cg")
        at = gl.expand_dims(place * DIM, 1) + gl.expand_dims(column + dim, 0)
        inside = gl.expand_dims(row < end, 1) & gl.expand_dims(dim < WIDTH, 0)
        acc = gl.load(sum_acc + at, inside, 0.0, cache_modifier=".cg")
    else:
        m = gl.full([R], float("-inf"), gl.float32, rows)
        lanes = gl.zeros([R, 8], gl.float32, lane_layout)
        acc = gl.zeros([R, WIDTH], gl.float32, layout)
    return m, lanes, acc


@gluon.jit
def write_sums(
    sum_m, sum_lanes, sum_acc, m, lanes, acc, head_row, first_row, end, R: gl.constexpr,
    DIM: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write m [R], lanes [R, 8] and acc [R, DIM] of the rows before `end`, for `first_sums`."""
    layout: gl.constexpr = acc.type.layout
    lane_layout: gl.constexpr = lanes.type.layout
    row = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    lane_row = first_row + gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, lane_layout))
    place = _places(head_row, row, KV_HEADS, GROUP)
    lane_place = _places(head_row, lane_row, KV_HEADS, GROUP)
    at = gl.expand_dims(lane_place * 8, 1) + gl.expand_dims(lane, 0)
    inside = gl.expand_dims(lane_row < end, 1) & gl.expand_dims(lane < 8, 0)
    gl.store(sum_lanes + at, lanes, mask=inside)
    at = gl.expand_dims(place * DIM, 1) + gl.expand_dims(dim, 0)
    inside = gl.expand_dims(row < end, 1) & gl.expand_dims(dim < DIM, 0)
    gl.store(sum_acc + at, acc, mask=inside)
    gl.store(sum_m + place, gl.convert_layout(m, gl.SliceLayout(1, layout)), mask=row < end)


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
    STORED: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Start copying N written blocks from `first`, zeros from `count` and from `columns` on, as one
    group."""
    # Copies of 16 bytes bypass the first-level cache, which may be stale.
    layout: gl.constexpr = copied_layout(WIDTH)
    row = first * STORED + gl.arange(0, N * STORED, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(row < count * STORED, 1) & gl.expand_dims(column < columns, 0)
    pointer = block_acc + gl.expand_dims(row * DIM, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(acc_buffer, pointer, mask=inside)
    lane_layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [WARPS, 1], [1, 0])
    lane_row = first * STORED + gl.arange(0, N * STORED, layout=gl.SliceLayout(1, lane_layout))
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
    ticket, parts, m, lanes, acc, block_m, block_lanes, block_acc, count, columns,
    STORED: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr, FLOATS: gl.constexpr,
):  # fmt: skip
    """(m, lanes, acc), as `first_sums` gives them, after a tile's `count` written blocks, in order.
    `columns` of acc were written, from its first one on.

    Each of the DIM / WIDTH folding programs calls it after `all_written`.
    """
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
              columns, STORED, WIDTH, DIM, N)  # fmt: skip
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
              first + 2 * N, count, columns, STORED, WIDTH, DIM, N)  # fmt: skip
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
