"""What feeds the consumers of `attention_backward_hopper`: a program's steps, and their copies.

A program owns `KEYS` keys of one KV head and walks over the tiles of `QUERIES` queries that see
them, which come through a ring of `STAGES` slots. Every slot has two barriers, one that it is full
and one that all who read it are done with it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

KEYS = gl.constexpr(128)
QUERIES = gl.constexpr(64)
STAGES = gl.constexpr(2)
"""Tiles of queries in shared memory at a time; at 128 columns no third fits beside the chains."""


@gluon.jit
def walk(
    programs, first_tiles, query_start, query_len, window, num_tiles, GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """(KV head, first key, the sequence's first row and length, number of its first tile for the
    group's first head, tiles of queries per head) of a program."""
    entry = programs + 3 * gl.program_id(0)
    sequence = gl.load(entry)
    first_key = gl.load(entry + 1)
    kv_head = gl.load(entry + 2)
    limit = gl.load(query_len + sequence)
    first_tile = kv_head * GROUP * num_tiles + gl.load(first_tiles + sequence)
    high = limit
    if WINDOWED:
        high = gl.minimum(limit, first_key + KEYS - 1 + window)
    per_head = gl.cdiv(high - first_key, QUERIES)
    return kv_head, first_key, gl.load(query_start + sequence), limit, first_tile, per_head


@gluon.jit
def step_at(step, first_key, first_tile, per_head, num_tiles):
    """(head of the group, first query after the first key, number of the tile, slot, turn) of a
    step: over the group's heads upward, then queries upward."""
    head = step // per_head
    ahead = step % per_head * QUERIES
    tile = first_tile + head * num_tiles + (first_key + ahead) // QUERIES
    return head, ahead, tile, step % STAGES, (step // STAGES) & 1


@gluon.jit
def tiles_before(first_key, ahead, window, WINDOWED: gl.constexpr):
    """How many tiles of keys before this one the queries of a step see."""
    first = first_key * 0
    if WINDOWED:
        first = gl.maximum(first_key + ahead - window + 1, 0) // KEYS
    return first_key // KEYS - first


@gluon.jit
def copy_queries(
    q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done, programs,
    first_tiles, query_start, query_len, window, num_tiles, GROUP: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Fill the ring of query tiles: q, do, and the two statistics of each query."""
    lane = gl.arange(0, QUERIES, layout=gl.BlockedLayout([2], [32], [1], [0]))
    kv_head, first_key, start_row, _limit, first_tile, per_head = walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        head, ahead, tile, slot, turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        statistics = STATISTICS + tile.to(gl.int64) * (2 * QUERIES) + lane
        lse = gl.load(statistics)
        delta = gl.load(statistics + QUERIES)
        at = [start_row + first_key + ahead, (kv_head * GROUP + head) * DIM]
        mbarrier.wait(done.index(slot), turn ^ 1)
        mbarrier.expect(full.index(slot), 2 * QUERIES * DIM * 2)
        tma.async_copy_global_to_shared(q_desc, at, full.index(slot), q_bufs.index(slot))
        tma.async_copy_global_to_shared(do_desc, at, full.index(slot), do_bufs.index(slot))
        lse_buf.index(slot).store(lse)
        delta_buf.index(slot).store(delta)
        gl.thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)
