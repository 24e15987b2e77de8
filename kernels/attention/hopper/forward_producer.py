"""The producer warps of `hopper/forward.py`: which tiles a program has, and the copies of them.

Queries are copied a tile ahead, keys and values through a ring of `STAGES` blocks. A buffer's two
barriers say that its copy has arrived (`full`) and that all consumers have read it (`empty`).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rl_consistency.kernels.attention.hopper.head_parts import (
    buffer_at,
    copy_masked_rows,
    copy_part,
    copy_rows,
    parts_of,
)
from rl_consistency.kernels.attention.hopper.tiles import thread_barrier

CONSUMER_ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)
WIDE = 32
"""Columns of the values that one product of a head above 128 takes: two such products, the sums of
256 columns and the probabilities fit the registers. With 64 columns more is spilled, and 1,024
tokens of 8 heads of 256 take 200 us in place of 193 (H100)."""


@gluon.constexpr_function
def value_parts(dim):
    """`parts_of` for the values: (first column, columns) of each product."""
    return tuple((i, WIDE) for i in range(0, dim, WIDE)) if dim > 128 else parts_of(dim)


@gluon.constexpr_function
def used_parts(dim, head_dim):
    """How many of `value_parts` have a column of the head; others hold only zeros."""
    return sum(first < head_dim for first, _ in value_parts(dim))


@gluon.jit
def values_at(v_bufs, slot, part: gl.constexpr):
    """The buffer [keys, columns] of one part of a block's values. Parts of one width lie side by
    side in one allocation."""
    alike: gl.constexpr = v_bufs[0].shape[0] // STAGES
    return v_bufs[part // alike].index(slot * alike + part % alike)


@gluon.jit
def count_tiles(num_tiles):
    """How many tiles this program has."""
    return gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def entry_of(turn, place):
    """Where (sequence, first row, KV head) of this program's turn-th tile are; see
    `forward_tiles`."""
    return place[0] + 3 * (turn * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def extent(
    sequence, first_row, place, KEYS: gl.constexpr, GROUP: gl.constexpr, WINDOWED: gl.constexpr
):
    """(row of the first token, queries, keys, first key, blocks) of a tile's sequence."""
    _tiles, _num_tiles, query_start, query_len, context_len, window = place
    q_len = gl.load(query_len + sequence)
    limit = gl.load(context_len + sequence)
    start_row = gl.load(query_start + sequence)
    past = limit - q_len
    last_position = gl.minimum(past + (first_row + 2 * CONSUMER_ROWS - 1) // GROUP, limit - 1)
    low = limit * 0
    if WINDOWED:
        low = gl.maximum(past + first_row // GROUP - window + 1, 0) // KEYS * KEYS
    return start_row, q_len, limit, low, gl.cdiv(last_position + 1 - low, KEYS)


@gluon.jit
def _load_queries(
    Q, q_descs, q_bufs, q_full, q_empty, turn, kv_head, first_row, start_row, q_len, stride_qt,
    stride_qh, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Fill both consumers' query buffers for the program's turn-th tile."""
    PARTS: gl.constexpr = parts_of(DIM)
    tiles_held: gl.constexpr = q_full.shape[0] // 2
    first = turn % tiles_held * 2
    phase = (turn // tiles_held) & 1
    for which in gl.static_range(2):
        mbarrier.wait(q_empty.index(first + which), phase ^ 1)
    if CONSUMER_ROWS % GROUP == 0:
        # Whole tokens. Rows past the sequence's end belong to another; they get no result.
        tokens: gl.constexpr = CONSUMER_ROWS // GROUP
        for which in gl.static_range(2):
            token_row = start_row + first_row // GROUP + which * tokens
            full = q_full.index(first + which)
            mbarrier.expect(full, CONSUMER_ROWS * DIM * 2)
            copy_rows(
                q_descs, token_row, kv_head * GROUP, full, buffer_at(q_bufs, first + which), GROUP,
                DIM,
            )  # fmt: skip
    else:
        base = Q + start_row.to(gl.int64) * stride_qt + kv_head.to(gl.int64) * GROUP * stride_qh
        # Not unrolled: the addresses of all rows at once would not fit the registers.
        for which in range(2):
            for part in gl.static_range(len(PARTS)):
                copy_masked_rows(
                    base, q_bufs[part].index(first + which), PARTS[part][0],
                    first_row + which * CONSUMER_ROWS, q_len * GROUP, stride_qt, stride_qh, GROUP,
                    HEAD_DIM,
                )  # fmt: skip
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        for which in gl.static_range(2):
            mbarrier.arrive(q_full.index(first + which), count=1)


@gluon.jit
def produce(
    Q, V, q_descs, k_descs, v_descs, q_bufs, q_full, q_empty, ring, place, stride_qt, stride_qh,
    stride_vt, stride_vh, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Copy the program's tiles one after another."""
    k_bufs, v_bufs, k_full, v_full, k_empty, v_empty = ring
    keys: gl.constexpr = k_bufs[0].shape[1]
    VALUES: gl.constexpr = value_parts(DIM)
    used: gl.constexpr = used_parts(DIM, HEAD_DIM)
    value_columns: gl.constexpr = VALUES[used - 1][0] + VALUES[used - 1][1]
    done = gl.to_tensor(0)
    tiles_here = count_tiles(place[1])
    entry = entry_of(done, place)
    sequence, first_row, kv_head = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    start_row, q_len, limit, low, count = extent(sequence, first_row, place, keys, GROUP, WINDOWED)
    _load_queries(
        Q, q_descs, q_bufs, q_full, q_empty, done, kv_head, first_row, start_row, q_len, stride_qt,
        stride_qh, GROUP, HEAD_DIM, DIM,
    )  # fmt: skip
    for turn in range(tiles_here):
        entry = entry_of(gl.minimum(turn + 1, tiles_here - 1), place)
        sequence, next_first, next_head = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        next_start, next_len, next_limit, next_low, next_count = extent(
            sequence, next_first, place, keys, GROUP, WINDOWED
        )
        for i in range(count):
            start = low + i * keys
            slot = done % STAGES
            phase = (done // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), keys * DIM * 2)
            copy_rows(
                k_descs, start_row + start, kv_head, k_full.index(slot), buffer_at(k_bufs, slot), 1,
                DIM,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            if start + keys <= limit:
                mbarrier.expect(v_full.index(slot), keys * value_columns * 2)
                for part in gl.static_range(used):
                    copy_part(
                        v_descs[min(part, len(v_descs) - 1)], start_row + start, kv_head,
                        VALUES[part][0], v_full.index(slot), values_at(v_bufs, slot, part), 1,
                    )  # fmt: skip
            else:
                # Rows past the sequence's end belong to another: a NaN there times 0 is NaN.
                base = (
                    V
                    + (start_row + start).to(gl.int64) * stride_vt
                    + kv_head.to(gl.int64) * stride_vh
                )
                for part in gl.static_range(used):
                    copy_masked_rows(
                        base, values_at(v_bufs, slot, part), VALUES[part][0], 0, limit - start,
                        stride_vt, stride_vh, 1, HEAD_DIM,
                    )  # fmt: skip
                async_copy.commit_group()
                async_copy.wait_group(0)
                fence_async_shared()
                thread_barrier()
                mbarrier.arrive(v_full.index(slot), count=1)
            # Once this tile's second block has a slot, the tile before has freed the next tile's
            # query buffer. Any earlier the producer would have to wait. Where all tiles use the
            # same buffer, this one's consumers need all their blocks before they free it.
            last = count - 1
            if q_full.shape[0] > 2:
                last = gl.minimum(last, 1)
            if (i == last) & (turn + 1 < tiles_here):
                _load_queries(
                    Q, q_descs, q_bufs, q_full, q_empty, turn + 1, next_head, next_first,
                    next_start, next_len, stride_qt, stride_qh, GROUP, HEAD_DIM, DIM,
                )  # fmt: skip
            # Phases repeat, so no warp may fall behind by a whole round of the buffers.
            thread_barrier()
            done += 1
        kv_head, first_row, start_row, q_len = next_head, next_first, next_start, next_len
        limit, low, count = next_limit, next_low, next_count
