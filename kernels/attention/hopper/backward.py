"""The backward pass on sm_90 in five products: one kernel with specialised warps.

A program owns 128 keys of one KV head, for all query heads of the group or for some. Its steps are
the tiles of 64 queries that see them, one query head after another. The bits are those of the two
kernels of `backward_triton`; scores are computed once.

dq of a tile of queries is one chain of matrix steps over keys, upward. Each program loads the fp32
sums of the keys before its own, continues them, and stores them for the next keys. A counter per
tile of queries and head says how many tiles of keys have stored their sums. Programs for the same
keys continue each other's sums of dk and dv likewise, head after head.

Eight warps compute. To keep the matrix units busy, a step starts the next step's scores behind its
own products, and computes dq before dk, so that dq leaves during dk's product. One warp copies each
step's queries in, through a ring of `STAGES` slots; two carry the chains of dq through memory.

A program waits only for programs with lower ids (`backward_programs`). Devices start programs in
the order of their ids, so those run already; no device promises this. No bit depends on how the
host cuts the groups' heads or orders the programs.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.tiles import (
    OPTIONS,
    barriers,
    buffers,
    copy_rows,
    fresh_zero,
    head_descriptor,
    signal,
    start_scores,
    thread_barrier,
)
from rl_consistency.kernels.attention.layout import PackedSequences, from_host
from rl_consistency.kernels.attention.schedules import FIVE_PRODUCTS, PER_CALL, chain_bytes, padded
from rl_consistency.kernels.attention.tiles_triton import BackwardCall, addresses
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.launch import cdiv, gluon_descriptor, remembered
from rl_consistency.kernels.reduction.tree_fold_triton import LOG2E, tree_fold

APART = 1.25
"""How far apart sequences and KV heads lie in the order of programs for all heads, as a multiple of
the programs of one that run at a time. Measured (ADR 7)."""
WAVE = 4
"""Steps per head of a program by which a tile of keys starts after the one before, in the order of
programs for a part of the group: a tile begins at later queries, and its program should not wait
for them."""
HANDOVER = 5
"""Steps that a program for a part of the group costs beside its own: among them to hand sums of dk
and dv over. Fitted to 27 shapes (docs/log.md)."""
ALONE = 2
"""Steps that a program for all heads costs beside its own. Fitted likewise."""
IDLE = 0.5
"""The part of one round of programs that is spent waiting: each tile of keys keeps the pace of the
first in every head, and ends with it. Fitted likewise."""
ROUNDS = 3
"""The most rounds of programs for all heads whose groups are parted. With more, parts gain up to
0.15 and lose up to 0.13, and the sums above do not say which."""
NUMBERS = 6
"""Numbers in a program's entry: sequence, first key, KV head, first head of the group, heads, place
of its sums."""
ENTRY = gl.constexpr(NUMBERS)
KEYS = gl.constexpr(FIVE_PRODUCTS.keys)
QUERIES = gl.constexpr(FIVE_PRODUCTS.rows)
STAGES = gl.constexpr(FIVE_PRODUCTS.stages)
"""Tiles of queries in shared memory; at D = 128 no third fits beside the chains."""
ROW = gl.constexpr(256)
"""fp32 sums in a row of the chains, as their descriptors see them."""


@dataclass(frozen=True)
class Programs:
    """The programs of a launch."""

    entries: Tensor
    """[programs, 6] int32 on a device, in the order of their ids; see `NUMBERS`."""
    places: int
    """Tiles of keys and KV heads whose sums pass through memory; 0 where none do. The sums are at
    most 2 / group of the chains' size."""


def backward_programs(
    layout: PackedSequences,
    device: torch.device,
    kv_heads: int,
    group: int,
    multiprocessors: int,
    window: int | None,
    heads: int | None = None,
) -> Programs:
    """The programs of a call, made once for a layout. Tests give `heads`: the most query heads that
    a program takes."""
    asked = (kv_heads, group, multiprocessors, window)
    if heads is None:
        heads = layout.kept(("heads", *asked), lambda: _heads_of_a_program(layout, *asked))
    return layout.kept(
        ("backward_programs", device, kv_heads, group, multiprocessors, heads),
        lambda: _programs_in_order(layout, device, kv_heads, group, multiprocessors, heads),
    )


def _heads_of_a_program(
    layout: PackedSequences, kv_heads: int, group: int, multiprocessors: int, window: int | None
) -> int:
    """The most query heads of a program: where few programs share the device, parts of the group
    wait less for one another than they cost."""
    if window is not None and window < layout.most_queries:
        return group  # tiles have about equally many steps: waits are short
    tiles = sum(cdiv(n, FIVE_PRODUCTS.keys) for n in layout.query_lens)
    rounds = tiles * kv_heads / multiprocessors
    if not 1 < rounds <= ROUNDS:
        return group  # in one round all run at once, and the first tile takes all heads anyway
    steps = (
        sum(
            cdiv(n - i, FIVE_PRODUCTS.rows)
            for n in layout.query_lens
            for i in range(0, n, FIVE_PRODUCTS.keys)
        )
        / tiles
    )

    def cost(heads: int) -> float:
        parts = cdiv(group, heads)
        waits = 1 + IDLE / (rounds * parts)
        return group * steps * waits + parts * (HANDOVER if parts > 1 else ALONE)

    # No part has one head: two take less time in every shape measured.
    return min((cdiv(group, parts) for parts in range(1, max(group // 2, 1) + 1)), key=cost)


def _programs_in_order(
    layout: PackedSequences,
    device: torch.device,
    kv_heads: int,
    group: int,
    multiprocessors: int,
    heads: int,
) -> Programs:
    tiles = [
        (sequence, first_key, kv_head)
        for sequence, queries in enumerate(layout.query_lens)
        for first_key in range(0, queries, FIVE_PRODUCTS.keys)
        for kv_head in range(kv_heads)
    ]
    sequence, first_key, kv_head = torch.tensor(tiles, dtype=torch.int64).view(-1, 3).unbind(1)
    queries = torch.tensor(list(layout.query_lens), dtype=torch.int64)[sequence] - first_key
    place = torch.arange(len(tiles))
    count = cdiv(group, heads)
    if count > 1:
        # Smaller parts come first: so first / size, rounded up, is the number of parts before one.
        sizes = [(group + i) // count for i in range(count)]
        # When a part's first tile starts, and how long after it another: both in steps.
        begin, starts, parts = 0.0, [], []
        for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            starts.append(begin + first_key // FIVE_PRODUCTS.keys * (WAVE * size))
            own = (torch.full_like(place, first), torch.full_like(place, size))
            parts.append(torch.stack([sequence, first_key, kv_head, *own, place], dim=1))
            steps = (queries + FIVE_PRODUCTS.rows - 1) // FIVE_PRODUCTS.rows * size + HANDOVER
            longest = cdiv(layout.most_queries, FIVE_PRODUCTS.rows) * size + HANDOVER
            begin += max(longest, float(steps.sum()) / multiprocessors)
        start, entries = torch.cat(starts), torch.cat(parts)
    else:
        # Tiles of one sequence and head would end together if they ran side by side. So sequences
        # and heads lie apart: they end at different times, and their next tiles start one by one.
        pairs = max(1, len(layout.query_lens) * kv_heads)
        resident = multiprocessors / pairs
        apart = APART * resident if resident >= 2 else 0.0
        start = (
            sequence * kv_heads + kv_head
        ).double() / pairs * FIVE_PRODUCTS.keys * apart - queries
        own = (torch.zeros_like(place), torch.full_like(place, group))
        entries = torch.stack([sequence, first_key, kv_head, *own, place], dim=1)
    order = torch.argsort(start, stable=True)
    entries = entries[order].to(torch.int32).contiguous()
    return Programs(from_host(entries, device), len(tiles) if count > 1 else 0)


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


@gluon.jit
def walk(place, GROUP: gl.constexpr, WINDOWED: gl.constexpr):
    """(KV head, first query head, query heads, first key, its sequence's first row, its sequence's
    keys, number of the sequence's first tile of queries for the first query head, tiles of queries
    per head) of a program."""
    programs, first_tiles, query_start, query_len, window, num_tiles = place
    entry = programs + ENTRY * gl.program_id(0)
    sequence = gl.load(entry)
    first_key = gl.load(entry + 1)
    kv_head = gl.load(entry + 2)
    first_head = kv_head * GROUP + gl.load(entry + 3)
    heads = gl.load(entry + 4)
    limit = gl.load(query_len + sequence)
    first_tile = first_head * num_tiles + gl.load(first_tiles + sequence)
    high = limit
    if WINDOWED:
        high = gl.minimum(limit, first_key + KEYS - 1 + window)
    per_head = gl.cdiv(high - first_key, QUERIES)
    start_row = gl.load(query_start + sequence)
    return kv_head, first_head, heads, first_key, start_row, limit, first_tile, per_head


@gluon.jit
def step_at(step, first_key, first_tile, per_head, num_tiles):
    """(head of the program, first query minus first key, tile, slot and round of the ring) of a
    step. Steps go over the heads upward, then over queries upward."""
    head = step // per_head
    ahead = step % per_head * QUERIES
    tile = first_tile + head * num_tiles + (first_key + ahead) // QUERIES
    return head, ahead, tile, step % STAGES, (step // STAGES) & 1


@gluon.jit
def tiles_before(first_key, ahead, window, WINDOWED: gl.constexpr):
    """How many tiles of keys before the program's own a step's queries see."""
    first = first_key * 0
    if WINDOWED:
        first = gl.maximum(first_key + ahead - window + 1, 0) // KEYS
    return first_key // KEYS - first


@gluon.jit
def copy_queries(
    q_desc, do_desc, STATISTICS, ring, full, done, place, WALK: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: fill the ring with q, do and the two statistics of each step's queries. WALK is
    `walk`, or says the same of another kernel's program."""
    q_bufs, do_bufs, lse_buf, delta_buf = ring
    lane = gl.arange(0, QUERIES, layout=gl.BlockedLayout([2], [32], [1], [0]))
    _kv_head, first_head, heads, first_key, start_row, _limit, first_tile, per_head = WALK(
        place, GROUP, WINDOWED
    )
    for step in range(heads * per_head):
        head, ahead, tile, slot, turn = step_at(step, first_key, first_tile, per_head, place[5])
        statistics = STATISTICS + tile.to(gl.int64) * (2 * QUERIES) + lane
        lse = gl.load(statistics)
        delta = gl.load(statistics + QUERIES)
        row = start_row + first_key + ahead
        q_buf, do_buf = q_bufs.index(slot), do_bufs.index(slot)
        mbarrier.wait(done.index(slot), turn ^ 1)
        mbarrier.expect(full.index(slot), 2 * QUERIES * DIM * 2)
        copy_rows(q_desc, row, first_head + head, 0, full.index(slot), q_buf, 1)
        copy_rows(do_desc, row, first_head + head, 0, full.index(slot), do_buf, 1)
        lse_buf.index(slot).store(lse)
        delta_buf.index(slot).store(delta)
        signal(full.index(slot))


def empty_chains(
    layout: PackedSequences, heads: int, dim: int, device: torch.device
) -> tuple[Tensor, Any]:
    """Memory for the chains, [heads * tiles * QUERIES * dim / ROW, ROW] fp32, and a descriptor of
    it, whose box is one tile."""
    # A descriptor needs memory even where no chain is read.
    size = max(chain_bytes(layout, heads, dim) // 4, QUERIES.value * dim)
    chains = torch.empty(size // ROW.value, ROW.value, dtype=torch.float32, device=device)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    box = (QUERIES.value * dim // ROW.value, ROW.value)
    return chains, gluon_descriptor(chains, box, chains.shape, (ROW.value, 1), plain)


@gluon.constexpr_function
def chain_layout(dim):
    """The shared layout of [QUERIES, dim] sums in the matrix units' order: the four sums of a
    thread (two rows, two columns) side by side, then the sums of a warp."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    bases += [[0, 1 << i] for i in range(3, (dim // 2).bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[16, 0], [32, 0], [0, dim // 2]])


@gluon.constexpr_function
def query_layout(columns):
    """The layout of dq [QUERIES, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@gluon.jit
def _copy_queries(
    q_desc, do_desc, STATISTICS, ring, full, done, place, GROUP: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """`copy_queries` by `walk`: Triton 3.6 takes no function as an argument of a warp."""
    copy_queries(q_desc, do_desc, STATISTICS, ring, full, done, place, walk, GROUP, DIM, WINDOWED)


@gluon.jit
def chain_view(buf):
    """A box of the chains in shared memory as [QUERIES, columns]."""
    columns: gl.constexpr = buf.shape[0] * ROW // QUERIES
    return buf._reinterpret(gl.float32, [QUERIES, columns], chain_layout(columns))


@gluon.jit
def _until(counter, number):
    """Wait until a counter reaches `number`; copies then see what was written before it counted."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred short;
        again:
        ld.acquire.gpu.global.s32 $0, [$1];
        setp.lt.s32 short, $0, $2;
        @short bra again;
        fence.proxy.async.global;
        }""",
        "=&r,l,r", [counter, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _count(counter):
    """Add 1 to a counter, after all that the threads of this group have written."""
    thread_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def _prefetch(place, size):
    """Bring `size` bytes into the second-level cache."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [place, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _fetch_chains(
    CHAINS, chain_desc, in_buf, counters, ready, gone, place,
    GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: at each step, wait for the earlier keys' sums of dq and copy them in."""
    SIZE: gl.constexpr = QUERIES * DIM
    _kv_head, _first, heads, first_key, _row, _limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    window, num_tiles = place[4], place[5]
    for step in range(heads * per_head):
        _head, ahead, tile, _slot, _turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        before = tiles_before(first_key, ahead, window, WINDOWED)
        _until(counters + tile, before)
        if before > 0:
            _prefetch(CHAINS + tile.to(gl.int64) * SIZE, before * 0 + SIZE * 4)
        # The step before must have sent its sums: it used the same buffer and barrier.
        last = step + STAGES - 1
        mbarrier.wait(gone.index(last % STAGES), (last // STAGES) & 1 ^ 1)
        if before > 0:
            mbarrier.expect(ready, SIZE * 4)
            tma.async_copy_global_to_shared(chain_desc, [tile * (SIZE // ROW), 0], ready, in_buf)
        else:
            mbarrier.arrive(ready, count=1)


@gluon.jit
def _leave_chains(
    chain_desc, out_buf, counters, gone, free, place,
    GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: copy the sums of dq of each step to memory, and count them."""
    _kv_head, _first, heads, first_key, _row, _limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    num_tiles = place[5]
    for step in range(heads * per_head):
        _head, ahead, tile, slot, turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        mbarrier.wait(gone.index(slot), turn)
        # The last keys have rounded dq, which no program continues.
        if ahead >= KEYS:
            tma.async_copy_shared_to_global(chain_desc, [tile * (QUERIES * DIM // ROW), 0], out_buf)
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(free, count=1)
            # out_buf has been read. Before counting, memory must have been written as well.
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r,r",
                [step], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            _count(counters + tile)
        else:
            mbarrier.arrive(free, count=1)


@gluon.constexpr_function
def _sums_layout(columns):
    """The layout of dk and dv [KEYS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.jit
def _places(X, rows, strides, HEAD_DIM: gl.constexpr, shape: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to [rows, columns] of one head, and whether they are within the sequence and
    HEAD_DIM. `rows`: the first one in the sequence, the sequence's first row, the head, and the
    sequence's end; `strides` those of a token and a head."""
    first, start_row, head, limit = rows
    row = first + gl.arange(0, shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, shape[1], layout=gl.SliceLayout(0, LAYOUT))
    offset = (start_row + row).to(gl.int64) * strides[0] + head * strides[1]
    pointer = X + gl.expand_dims(offset, 1) + gl.expand_dims(dim, 0)
    return pointer, gl.expand_dims(row < limit, 1) & gl.expand_dims(dim < HEAD_DIM, 0)


@gluon.jit
def load_rows(X, buffer, rows, strides, HEAD_DIM: gl.constexpr):
    """Fill a buffer [rows, DIM] from one head: zeros past the sequence and from column HEAD_DIM on;
    see `_places`."""
    DIM: gl.constexpr = buffer.shape[1]
    # 16 bytes a thread, whole rows a warp.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [8, 1], [1, 0])
    shape: gl.constexpr = buffer.shape
    pointer, mask = _places(X, rows, strides, HEAD_DIM, shape, layout)
    buffer.store(gl.load(pointer, mask=mask, other=0.0))


@gluon.jit
def write_gradient(X, sums, scale, rows, strides, HEAD_DIM: gl.constexpr):
    """Round `sums` times `scale` [rows, DIM] to HEAD_DIM columns of one head, up to the sequence's
    end; see `_places`."""
    value = sums * scale + 0.0
    shape: gl.constexpr = value.shape
    layout: gl.constexpr = value.type.layout
    pointer, mask = _places(X, rows, strides, HEAD_DIM, shape, layout)
    gl.store(pointer, value.to(X.dtype.element_ty), mask=mask)


@gluon.jit
def _place_of_sums(SUMS, entry, which: gl.constexpr, like):
    """Where a program keeps its sums of dk (0) or dv (1), shaped and laid out as `like`."""
    layout: gl.constexpr = like.type.layout
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    row = gl.expand_dims(gl.arange(0, rows, layout=gl.SliceLayout(1, layout)), 1)
    dim = gl.expand_dims(gl.arange(0, columns, layout=gl.SliceLayout(0, layout)), 0)
    first = (gl.load(entry + 5).to(gl.int64) * 2 + which) * (rows * columns)
    return SUMS + first + row * columns + dim


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
    return start_scores(k_buf, q_bufs.index(after % STAGES), S)


@gluon.jit
def _send(dQ, out_buf, free, dq, step, ahead, rows, scale, strides, HEAD_DIM: gl.constexpr):
    """Round and store dq if these are its last keys, else leave it to `_leave_chains`."""
    mbarrier.wait(free, step & 1 ^ 1)
    if ahead < KEYS:
        own = (rows[0] + ahead, rows[1], rows[2], rows[3])
        write_gradient(dQ, dq, scale, own, strides, HEAD_DIM)
    else:
        chain_view(out_buf).store(dq)
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
    D: gl.constexpr = _sums_layout(DIM)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = ds_bufs.dtype
    kv_head, first_head, heads, first_key, start_row, limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    window, num_tiles = place[4], place[5]
    own_keys = (first_key, start_row, kv_head, limit)
    load_rows(K, k_bufs.index(0), own_keys, (stride_kt, stride_kh), HEAD_DIM)
    load_rows(V, v_bufs.index(0), own_keys, (stride_vt, stride_vh), HEAD_DIM)
    fence_async_shared()
    thread_barrier()
    dk = gl.full([KEYS, DIM], 0.0, gl.float32, D)
    dv = gl.full([KEYS, DIM], 0.0, gl.float32, D)
    entry = place[0] + ENTRY * gl.program_id(0)
    before = first_head - kv_head * GROUP
    if before > 0:
        _until(handed + gl.load(entry + 5), gl.cdiv(before, heads))
        dk = gl.load(_place_of_sums(SUMS, entry, 0, dk))
        dv = gl.load(_place_of_sums(SUMS, entry, 1, dv))
    steps = heads * per_head
    mbarrier.wait(full.index(0), 0)
    first = start_scores(k_bufs.index(0), q_bufs.index(0), S)
    scores = warpgroup_mma_wait(0, deps=[first])
    for step in range(steps):
        head, ahead, _tile, slot, _turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        q_buf, do_buf = q_bufs.index(slot), do_bufs.index(slot)
        zero = fresh_zero(step)
        k_buf, v_buf = k_bufs.index(zero), v_bufs.index(zero)
        ds_buf = ds_bufs.index(zero)
        dp = start_scores(v_buf, do_buf, S)
        lse = lse_buf.index(slot).load(columns)
        p = _probabilities(scores, lse, ahead, window, factor, WINDOWED)
        rounded = gl.convert_layout(p.to(dtype), operand)
        dv = warpgroup_mma(rounded, do_buf, dv, is_async=True)
        delta = gl.expand_dims(delta_buf.index(slot).load(columns), 0)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - delta)).to(dtype)
        # A chain without earlier keys starts from zero.
        begun = tiles_before(first_key, ahead, window, WINDOWED) > 0
        mbarrier.wait(ready, step & 1)
        dq = gl.where(begun, chain_view(in_buf).load(query_layout(DIM)), 0.0)
        ds_buf.store(ds)
        fence_async_shared()
        thread_barrier()
        dq = warpgroup_mma(ds_buf.permute([1, 0]), k_buf, dq, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q_buf, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
        rows = (first_key, start_row, first_head + head, limit)
        _send(dQ, out_buf, free, dq, step, ahead, rows, scale, (stride_dqt, stride_dqh), HEAD_DIM)
        # The compiler puts barriers of all warps around every arrival: here the matrix units still
        # have work.
        coming = _next_scores(k_buf, q_bufs, full, step, steps, S)
        thread_barrier()
        mbarrier.arrive(gone.index(slot), count=1)
        dk = warpgroup_mma_wait(1, deps=[dk])
        thread_barrier()
        mbarrier.arrive(done.index(slot), count=1)
        thread_barrier()
        scores = warpgroup_mma_wait(0, deps=[coming])
    if before + heads < GROUP:
        gl.store(_place_of_sums(SUMS, entry, 0, dk), dk)
        gl.store(_place_of_sums(SUMS, entry, 1, dv), dv)
        _count(handed + gl.load(entry + 5))
    else:
        write_gradient(dK, dk, scale, own_keys, (stride_dkt, stride_dkh), HEAD_DIM)
        write_gradient(dV, dv, 1.0, own_keys, (stride_dvt, stride_dvh), HEAD_DIM)


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_backward_hopper_kernel(
    K, V, dQ, dK, dV, SUMS, handed, CHAINS, STATISTICS, counters, q_desc, do_desc, chain_desc,
    programs, first_tiles, query_start, query_len, window, num_tiles, factor, scale, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt, stride_dkh, stride_dvt,
    stride_dvh, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """dk and dv [Tkv, Hkv, HEAD_DIM] of one tile of keys of one KV head, and its part of dq
    [T, H, HEAD_DIM]. Columns from HEAD_DIM to DIM are zeros, which change no sum.

    Grid: one program per entry of `programs`. STATISTICS and `counters` come from `statistics_of`,
    CHAINS (the sums of dq) from `empty_chains`. SUMS [places, 2, KEYS * DIM] fp32 holds dk and dv
    between programs, `handed` [places] how many programs have added to them.
    """
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_bufs = buffers(dtype, STAGES, QUERIES, DIM)
    do_bufs = buffers(dtype, STAGES, QUERIES, DIM)
    k_bufs = buffers(dtype, 1, KEYS, DIM)
    v_bufs = buffers(dtype, 1, KEYS, DIM)
    ds_bufs = gl.allocate_shared_memory(
        dtype, [1, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    )
    box: gl.constexpr = chain_desc.block_shape
    in_buf = gl.allocate_shared_memory(gl.float32, box, chain_desc.layout)
    out_buf = gl.allocate_shared_memory(gl.float32, box, chain_desc.layout)
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
            (_copy_queries, (
                q_desc, do_desc, STATISTICS, (q_bufs, do_bufs, lse_buf, delta_buf), full, done,
                place, GROUP, DIM, WINDOWED,
            )),
            (_fetch_chains, (
                CHAINS, chain_desc, in_buf, counters, ready, gone, place, GROUP, DIM, WINDOWED,
            )),
            (_leave_chains, (
                chain_desc, out_buf, counters, gone, free, place, GROUP, DIM, WINDOWED,
            )),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )  # fmt: skip


def attention_hopper_bwd(call: BackwardCall) -> None:
    """Fill dq, dk and dv."""
    do, q, k, v, dq, dk, dv = call.do, call.q, call.k, call.v, call.dq, call.dk, call.dv
    heads, dim, device = q.shape[1], padded(call.head_dim), q.device
    query_tiles, first_tiles = call.layout.query_tiles(device, QUERIES.value)
    statistics, counters = statistics_of(do, call.out, call.lse, call.layout, QUERIES.value)
    chains, chain_desc = empty_chains(call.layout, heads, dim, device)
    q_desc, do_desc = (head_descriptor(x, QUERIES.value, 1, dim) for x in (q, do))
    programs = backward_programs(
        call.layout, device, call.kv_heads, call.group, sm_count(device), call.window
    )
    entries, sums, handed = programs.entries, chains, counters
    if programs.places:
        sums = torch.empty(programs.places, 2, KEYS.value * dim, dtype=torch.float32, device=device)
        handed = torch.zeros(programs.places, dtype=torch.int32, device=device)
    attention_backward_hopper_kernel[(len(entries),)](
        k, v, dq, dk, dv, sums, handed, chains, statistics, counters, q_desc, do_desc, chain_desc,
        entries, first_tiles, *call.numbers[:2], call.reach, len(query_tiles), call.factor,
        call.scale, *k.stride()[:2], *v.stride()[:2], *dq.stride()[:2], *dk.stride()[:2],
        *dv.stride()[:2], DIM=dim, num_warps=8, maxnreg=168, **call.shape, **OPTIONS,
    )  # fmt: skip
