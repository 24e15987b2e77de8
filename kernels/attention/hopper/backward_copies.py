"""The copying warps of `hopper/backward.py`: a program's steps, and what goes in and out at each.

A program owns `KEYS` keys of one KV head (`backward_programs`). Its steps are the tiles of
`QUERIES` queries that see them, one query head after another. One warp copies each step's queries
in, through a ring of `STAGES` slots. Two warps carry the chains of dq through memory.

dq of a tile of queries is one chain of matrix steps over keys, upward. Each program loads the fp32
sums of the keys before its own, continues them, and stores them for the next keys. A counter per
tile of queries and head says how many tiles of keys have stored their sums.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from rl_consistency.kernels.attention.hopper.backward_programs import NUMBERS
from rl_consistency.kernels.attention.hopper.head_parts import buffer_at, copy_rows, parts_of
from rl_consistency.kernels.attention.hopper.tiles import thread_barrier
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import FIVE_PRODUCTS, chain_bytes
from rl_consistency.kernels.core.launch import gluon_descriptor

ENTRY = gl.constexpr(NUMBERS)
KEYS = gl.constexpr(FIVE_PRODUCTS.keys)
QUERIES = gl.constexpr(FIVE_PRODUCTS.rows)
STAGES = gl.constexpr(FIVE_PRODUCTS.stages)
"""Tiles of queries in shared memory; at D = 128 no third fits beside the chains."""
ROW = gl.constexpr(256)
"""fp32 sums in a row of the chains, as their descriptors see them."""


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
    q_descs, do_descs, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done, place,
    GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: fill the ring with q, do and the two statistics of each step's queries."""
    lane = gl.arange(0, QUERIES, layout=gl.BlockedLayout([2], [32], [1], [0]))
    _kv_head, first_head, heads, first_key, start_row, _limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    num_tiles = place[5]
    for step in range(heads * per_head):
        head, ahead, tile, slot, turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        statistics = STATISTICS + tile.to(gl.int64) * (2 * QUERIES) + lane
        lse = gl.load(statistics)
        delta = gl.load(statistics + QUERIES)
        row = start_row + first_key + ahead
        q_buf, do_buf = buffer_at(q_bufs, slot), buffer_at(do_bufs, slot)
        mbarrier.wait(done.index(slot), turn ^ 1)
        mbarrier.expect(full.index(slot), 2 * QUERIES * DIM * 2)
        copy_rows(q_descs, row, first_head + head, full.index(slot), q_buf, 1, DIM)
        copy_rows(do_descs, row, first_head + head, full.index(slot), do_buf, 1, DIM)
        lse_buf.index(slot).store(lse)
        delta_buf.index(slot).store(delta)
        thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)


def empty_chains(
    layout: PackedSequences, heads: int, dim: int, device: torch.device
) -> tuple[Tensor, list[Any]]:
    """Memory for the chains, [heads * tiles * QUERIES * dim / ROW, ROW] fp32, and a descriptor of
    it for each part of the columns. A box is that part of one tile; the parts of a tile lie one
    after the other."""
    # A descriptor needs memory even where no chain is read.
    size = max(chain_bytes(layout, heads, dim) // 4, QUERIES.value * dim)
    chains = torch.empty(size // ROW.value, ROW.value, dtype=torch.float32, device=device)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes = [(QUERIES.value * columns // ROW.value, ROW.value) for _, columns in parts_of(dim)]
    return chains, [gluon_descriptor(chains, b, chains.shape, (ROW.value, 1), plain) for b in boxes]


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
def chain_buffer(chain_descs):
    """Shared memory for the sums of one tile, as boxes of the descriptors."""
    made = ()
    for i in gl.static_range(len(chain_descs)):
        made = made + (
            gl.allocate_shared_memory(
                gl.float32, chain_descs[i].block_shape, chain_descs[i].layout
            ),
        )
    return made


@gluon.jit
def chain_view(buf):
    """One part of `chain_buffer` as [QUERIES, columns]."""
    columns: gl.constexpr = buf.shape[0] * ROW // QUERIES
    return buf._reinterpret(gl.float32, [QUERIES, columns], chain_layout(columns))


@gluon.jit
def until(counter, number):
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
def count(counter):
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
def fetch_chains(
    CHAINS, chain_descs, in_buf, counters, ready, gone, place,
    GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: at each step, wait for the earlier keys' sums of dq and copy them in."""
    SIZE: gl.constexpr = QUERIES * DIM
    PARTS: gl.constexpr = parts_of(DIM)
    _kv_head, _first, heads, first_key, _row, _limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    window, num_tiles = place[4], place[5]
    for step in range(heads * per_head):
        _head, ahead, tile, _slot, _turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        before = tiles_before(first_key, ahead, window, WINDOWED)
        until(counters + tile, before)
        if before > 0:
            _prefetch(CHAINS + tile.to(gl.int64) * SIZE, before * 0 + SIZE * 4)
        # The step before must have sent its sums: it used the same buffer and barrier.
        last = step + STAGES - 1
        mbarrier.wait(gone.index(last % STAGES), (last // STAGES) & 1 ^ 1)
        if before > 0:
            mbarrier.expect(ready, SIZE * 4)
            for i in gl.static_range(len(PARTS)):
                at = [tile * (SIZE // ROW) + QUERIES * PARTS[i][0] // ROW, 0]
                tma.async_copy_global_to_shared(chain_descs[i], at, ready, in_buf[i])
        else:
            mbarrier.arrive(ready, count=1)


@gluon.jit
def leave_chains(
    chain_descs, out_buf, counters, gone, free, place,
    GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One warp: copy the sums of dq of each step to memory, and count them."""
    _kv_head, _first, heads, first_key, _row, _limit, first_tile, per_head = walk(
        place, GROUP, WINDOWED
    )
    num_tiles = place[5]
    PARTS: gl.constexpr = parts_of(DIM)
    for step in range(heads * per_head):
        _head, ahead, tile, slot, turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        mbarrier.wait(gone.index(slot), turn)
        # The last keys have rounded dq, which no program continues.
        if ahead >= KEYS:
            for i in gl.static_range(len(PARTS)):
                at = [tile * (QUERIES * DIM // ROW) + QUERIES * PARTS[i][0] // ROW, 0]
                tma.async_copy_shared_to_global(chain_descs[i], at, out_buf[i])
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(free, count=1)
            # out_buf has been read. Before counting, memory must have been written as well.
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r,r",
                [step], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            count(counters + tile)
        else:
            mbarrier.arrive(free, count=1)
