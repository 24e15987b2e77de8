"""The forward pass on sm_90 with specialised warps, for packed sequences.

The host deals tiles to programs (`dealt_tiles`). A program has three groups of warps.

A producer copies queries a tile ahead, keys and values through a ring of `STAGES` blocks. A
buffer's two barriers say that its copy has arrived (`full`) and that all consumers have read it
(`empty`).

Two consumers own 64 rows of the tile each, and take turns at the matrix unit. A turn is the product
of one block's probabilities and values, then the next block's scores; meanwhile the other consumer
computes its exponentials. The values of a head above 128 are held in parts of their columns, with a
product for each, started one after another: the sums of all columns and of one whole block would
not fit the registers.

The bits are those of `forward_triton`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.tiles import (
    NEG_INF,
    OPTIONS,
    OWN_LANES,
    barriers,
    buffers,
    copy_masked_rows,
    copy_rows,
    halve,
    head_descriptor,
    keep_seen,
    own_stored_layout,
    start_scores,
    thread_barrier,
    write_rows,
)
from rl_consistency.kernels.attention.layout import AttentionLayout, from_host
from rl_consistency.kernels.attention.schedules import PER_CALL, PREFILL_HOPPER
from rl_consistency.kernels.attention.tiles_triton import ForwardCall
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.launch import remembered

ROWS = PREFILL_HOPPER.rows
"""Rows of a tile, 64 for each consumer."""
SHORT_KEYS = 8192
"""Longest context for which a program walks over several tiles; measured."""
ROUND = 2.2
"""What a tile costs beside its blocks of keys, in blocks: its first scores, its results, the last
product that nothing overlaps. By clock stamps on an H100 (docs/log.md)."""
UPPER, LOWER = gl.constexpr(0), gl.constexpr(1)
CONSUMER_ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)
WIDE = 32
"""Columns of the values that one product of a head above 128 takes: two such products, the sums of
256 columns and the probabilities fit the registers. With 64 columns more is spilled, and 1,024
tokens of 8 heads of 256 take 200 us in place of 193 (H100)."""


def dealt_tiles(
    layout: AttentionLayout, device: torch.device, group: int, kv_heads: int, keys: int,
    window: int | None, programs: int,
) -> Tensor:  # fmt: skip
    """[tiles, 3] int32 on a device, made once for a layout: sequence, first row in it, KV head.
    Program p has the entries p, p + programs, p + 2 programs and so on. A block has `keys`."""
    asked = group, kv_heads, keys, window, programs
    return layout.kept(
        ("dealt_tiles", device, *asked), lambda: from_host(_dealt(layout, *asked), device)
    )


def _dealt(
    layout: AttentionLayout, group: int, kv_heads: int, keys: int, window: int | None, programs: int
) -> Tensor:
    tiles = layout.tiles(torch.device("cpu"), group, ROWS)
    # One head after another: the programs find its keys in the L2 cache.
    head = torch.arange(kv_heads, dtype=torch.int32).repeat_interleave(len(tiles))
    entries = torch.column_stack([tiles.repeat(kv_heads, 1), head])
    if programs >= len(entries):
        return entries
    cost = (blocks_read(layout, tiles, group, keys, window) + ROUND).repeat(kv_heads)
    dealt = torch.full((-(-len(entries) // programs), programs), -1)
    load = torch.zeros(programs, dtype=torch.float64)
    for i, costs in enumerate(cost.split(programs)):
        longest = costs.argsort(descending=True, stable=True)
        least = load.argsort(stable=True)[: len(longest)]
        dealt[i, least] = longest + i * programs
        load[least] += costs[longest]
    # The last round may be short: the programs that have a tile in it come first.
    order = dealt[:, (dealt[-1] < 0).to(torch.int32).argsort(stable=True)].flatten()
    return entries[order[order >= 0]]


def blocks_read(
    layout: AttentionLayout, tiles: Tensor, group: int, keys: int, window: int | None
) -> Tensor:
    """Blocks of keys that each tile [sequence, first row] reads."""
    sequence, first_row = tiles.long().unbind(1)
    limit = torch.tensor(list(layout.context_lens))[sequence]
    past = limit - torch.tensor(list(layout.query_lens))[sequence]
    last = torch.minimum(past + (first_row + ROWS - 1) // group, limit - 1)
    first = torch.zeros_like(last)
    if window is not None:
        first = (past + first_row // group - window + 1).clamp(min=0) // keys
    return last // keys + 1 - first


@gluon.constexpr_function
def value_parts(dim):
    """(first column, columns) of each product with the values."""
    return tuple((i, WIDE) for i in range(0, dim, WIDE)) if dim > 128 else ((0, dim),)


@gluon.constexpr_function
def _used_parts(dim, head_dim):
    """How many of `value_parts` have a column of the head; others hold only zeros."""
    return sum(first < head_dim for first, _ in value_parts(dim))


@gluon.jit
def _values_at(v_bufs, slot, part: gl.constexpr):
    """The buffer [keys, columns] of one part of a block's values."""
    PARTS: gl.constexpr = v_bufs.shape[0] // STAGES
    return v_bufs.index(slot * PARTS + part)


@gluon.jit
def _count_tiles(num_tiles):
    """How many tiles this program has."""
    return gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _entry_of(turn, place):
    """Where the entry of this program's turn-th tile is: see `dealt_tiles`."""
    return place[0] + 3 * (turn * gl.num_programs(0) + gl.program_id(0))


@gluon.jit
def _extent(
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
def _tile(turn, place, KEYS: gl.constexpr, GROUP: gl.constexpr, WINDOWED: gl.constexpr):
    """(KV head, first row, then what `_extent` gives) of this program's turn-th tile."""
    entry = _entry_of(turn, place)
    sequence, first_row, kv_head = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    start_row, q_len, limit, low, count = _extent(sequence, first_row, place, KEYS, GROUP, WINDOWED)
    return kv_head, first_row, start_row, q_len, limit, low, count


@gluon.jit
def _load_queries(
    Q, q_desc, queries, turn, tile, stride_qt, stride_qh, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Fill both consumers' query buffers for the program's turn-th tile, which is `_tile`."""
    q_bufs, q_full, q_empty = queries
    kv_head, first_row, start_row, q_len, _limit, _low, _count = tile
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
                q_desc, token_row, kv_head * GROUP, 0, full, q_bufs.index(first + which), GROUP
            )
    else:
        base = Q + start_row.to(gl.int64) * stride_qt + kv_head.to(gl.int64) * GROUP * stride_qh
        # Not unrolled: the addresses of all rows at once would not fit the registers.
        for which in range(2):
            copy_masked_rows(
                base, q_bufs.index(first + which), 0, first_row + which * CONSUMER_ROWS,
                q_len * GROUP, stride_qt, stride_qh, GROUP, HEAD_DIM,
            )  # fmt: skip
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        for which in gl.static_range(2):
            mbarrier.arrive(q_full.index(first + which), count=1)


@gluon.jit
def _produce(
    Q, V, q_desc, k_desc, v_desc, queries, ring, place, stride_qt, stride_qh, stride_vt, stride_vh,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The producer: copy the program's tiles one after another."""
    k_bufs, v_bufs, k_full, v_full, k_empty, v_empty = ring
    keys: gl.constexpr = k_bufs.shape[1]
    VALUES: gl.constexpr = value_parts(DIM)
    used: gl.constexpr = _used_parts(DIM, HEAD_DIM)
    value_columns: gl.constexpr = VALUES[used - 1][0] + VALUES[used - 1][1]
    done = gl.to_tensor(0)
    tiles_here = _count_tiles(place[1])
    tile = _tile(done, place, keys, GROUP, WINDOWED)
    _load_queries(
        Q, q_desc, queries, done, tile, stride_qt, stride_qh, GROUP, HEAD_DIM, DIM,
    )  # fmt: skip
    for turn in range(tiles_here):
        coming = _tile(gl.minimum(turn + 1, tiles_here - 1), place, keys, GROUP, WINDOWED)
        kv_head, _first_row, start_row, _q_len, limit, low, count = tile
        for i in range(count):
            start = low + i * keys
            slot = done % STAGES
            phase = (done // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), keys * DIM * 2)
            copy_rows(
                k_desc, start_row + start, kv_head, 0, k_full.index(slot), k_bufs.index(slot), 1
            )
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            if start + keys <= limit:
                mbarrier.expect(v_full.index(slot), keys * value_columns * 2)
                for part in gl.static_range(used):
                    copy_rows(
                        v_desc, start_row + start, kv_head, VALUES[part][0], v_full.index(slot),
                        _values_at(v_bufs, slot, part), 1,
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
                        base, _values_at(v_bufs, slot, part), VALUES[part][0], 0, limit - start,
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
            if queries[1].shape[0] > 2:
                last = gl.minimum(last, 1)
            if (i == last) & (turn + 1 < tiles_here):
                _load_queries(
                    Q, q_desc, queries, turn + 1, coming, stride_qt, stride_qh, GROUP, HEAD_DIM, DIM
                )
            # Phases repeat, so no warp may fall behind by a whole round of the buffers.
            thread_barrier()
            done += 1
        tile = coming


@gluon.jit
def _now(x):
    """x, computed here: the compiler otherwise puts it off, and keeps all that it is made of."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def _take_turn(turns, taken, WHICH: gl.constexpr):
    """Wait until the other consumer has given up the matrix unit; UPPER is first."""
    mbarrier.wait(turns.index(WHICH), (taken & 1) ^ (1 - WHICH))


@gluon.jit
def _give_turn(turns, WHICH: gl.constexpr):
    """Let the other consumer use the matrix unit."""
    thread_barrier()
    mbarrier.arrive(turns.index(1 - WHICH), count=1)


@gluon.jit
def _free(empty, done):
    """Tell the producer that this consumer has read the buffer of block `done`."""
    thread_barrier()
    mbarrier.arrive(empty.index(done % STAGES), count=1)


@gluon.jit
def _start_scores(done, q, ring, S: gl.constexpr):
    """Start the scores [64, keys] of a block."""
    k_bufs, _v_bufs, k_full, _v_full, _k_empty, _v_empty = ring
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    return start_scores(q, k_bufs.index(slot), S)


@gluon.constexpr_function
def _sums_layout(columns):
    """The layout of sums [64, columns] of the values."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _no_sums(DIM: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Sums of the values that are zero."""
    PARTS: gl.constexpr = value_parts(DIM)
    made = ()
    for i in gl.static_range(_used_parts(DIM, HEAD_DIM)):
        made = made + (
            gl.full([CONSUMER_ROWS, PARTS[i][1]], 0.0, gl.float32, _sums_layout(PARTS[i][1])),
        )
    return made


@gluon.jit
def _operands(p, acc):
    """The probabilities as the product with each part of the values takes them."""
    made = ()
    for i in gl.static_range(len(acc)):
        made = made + (gl.convert_layout(p, gl.DotOperandLayout(0, acc[i].type.layout, k_width=2)),)
    return made


@gluon.jit
def _start_values(p, slot, v_bufs, acc, PART: gl.constexpr):
    """Start the product of a block's probabilities and one part of the values' columns."""
    nothing = gl.zeros_like(acc[PART])
    return warpgroup_mma(
        p[PART], _values_at(v_bufs, slot, PART), nothing, use_acc=False, is_async=True
    )


@gluon.jit
def _beside(x, acc):
    """x [64] beside the sums [64, columns] of each part."""
    made = ()
    for i in gl.static_range(len(acc)):
        rows = gl.convert_layout(x, gl.SliceLayout(1, acc[i].type.layout))
        made = made + (gl.expand_dims(rows, 1),)
    return made


@gluon.jit
def _first_scores(done, q, ring, turns, WHICH: gl.constexpr, S: gl.constexpr):
    """Scores [64, keys] of a block that `_consume_block` did not start."""
    scores = _start_scores(done, q, ring, S)
    _give_turn(turns, WHICH)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _free(ring[4], done)
    return scores


@gluon.jit
def _consume_block(
    done, start, scores, q, ring, turns, taken, position, window, factor, m, lanes,
    acc, DIM: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr, WHICH: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """(next scores, m, lanes, acc) after folding the block of `scores`.

    An unmasked block is never the last: it computes the next block's scores. A masked one returns
    its own, which nothing reads.
    """
    k_bufs, v_bufs, _k_full, v_full, k_empty, v_empty = ring
    keys: gl.constexpr = k_bufs.shape[1]
    # The registers hold one product's sums beside those of all blocks before.
    early: gl.constexpr = len(acc) - 1
    lane_layout: gl.constexpr = lanes.type.layout
    slot = done % STAGES
    if MASKED:
        scores = keep_seen(scores, position - start, window, keys, WINDOWED)
    block_m = gl.max(scores, axis=1) * factor
    shift = block_m
    if MASKED:
        shift = gl.where(block_m == NEG_INF, 0.0, block_m)
    down = gl.expand_dims(-shift, 1) + gl.zeros_like(scores)
    p = gl.exp2(gl.fma(scores, factor + gl.zeros_like(scores), down))
    rounded = _operands(p.to(v_bufs.dtype), acc)
    mbarrier.wait(v_full.index(slot), (done // STAGES) & 1)
    _take_turn(turns, taken, WHICH)
    block_acc = _start_values(rounded, slot, v_bufs, acc, 0)
    # The row sums and the new maximum do not wait for the product.
    if keys == 128:
        p = halve(p, CONSUMER_ROWS, 128)
    part = halve(halve(halve(p, CONSUMER_ROWS, 64), CONSUMER_ROWS, 32), CONSUMER_ROWS, 16)
    part = gl.convert_layout(part, lane_layout)
    new_m = gl.maximum(m, block_m)
    shift = new_m
    if MASKED:
        shift = gl.where(new_m == NEG_INF, 0.0, new_m)
    left = gl.exp2(m - shift)
    right = gl.exp2(block_m - shift)
    left_lanes = gl.expand_dims(gl.convert_layout(left, gl.SliceLayout(1, lane_layout)), 1)
    right_lanes = gl.expand_dims(gl.convert_layout(right, gl.SliceLayout(1, lane_layout)), 1)
    lanes = gl.fma(part, right_lanes + gl.zeros_like(part), lanes * left_lanes)
    left, right = _beside(left, acc), _beside(right, acc)
    folded = ()
    for i in gl.static_range(early):
        coming = _start_values(rounded, slot, v_bufs, acc, i + 1)
        scaled = acc[i] * left[i]
        block_acc = warpgroup_mma_wait(1, deps=[block_acc])
        scaled = gl.fma(block_acc, right[i] + gl.zeros_like(scaled), scaled)
        folded = folded + (_now(scaled),)
        block_acc = coming
    scaled = acc[early] * left[early]
    block_acc = warpgroup_mma_wait(0, deps=[block_acc])
    _free(v_empty, done)
    if not MASKED:
        following = _start_scores(done + 1, q, ring, S)
    folded = folded + (gl.fma(block_acc, right[early] + gl.zeros_like(scaled), scaled),)
    if not MASKED:
        _give_turn(turns, WHICH)
        scores = warpgroup_mma_wait(0, deps=[following])
        _free(k_empty, done + 1)
    return scores, new_m, lanes, folded


@gluon.jit
def _consume(
    given, WHICH: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """One consumer, of rows 64 * WHICH .. of each tile: a turn for the first scores, then one for
    each block of keys."""
    results, queries, ring, turns, place, factor, strides = given
    q_bufs, q_full, q_empty = queries
    k_bufs, _v_bufs, k_full, v_full, k_empty, v_empty = ring
    keys: gl.constexpr = k_bufs.shape[1]
    tiles_held: gl.constexpr = q_full.shape[0] // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    window = place[5]
    done = gl.to_tensor(0)
    tiles_here = _count_tiles(place[1])
    kv_head, first_row, start_row, q_len, limit, low, tile_count = _tile(
        done, place, keys, GROUP, WINDOWED
    )
    for turn in range(tiles_here):
        # Read a tile ahead, for what is read with it while this tile's results are written.
        entry = _entry_of(gl.minimum(turn + 1, tiles_here - 1), place)
        sequence, next_first = gl.load(entry), gl.load(entry + 1)
        past = limit - q_len
        first = first_row + WHICH * CONSUMER_ROWS
        own = first + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, S))
        position = past + own // GROUP
        m = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        lanes = gl.zeros([CONSUMER_ROWS, 8], gl.float32, L)
        acc = _no_sums(DIM, HEAD_DIM)
        first_position = past + first // GROUP
        last_position = gl.minimum(past + (first + CONSUMER_ROWS - 1) // GROUP, limit - 1)
        count = gl.minimum(gl.cdiv(last_position + 1 - low, keys), tile_count)
        # The last block counts as masked because no block follows it.
        whole = gl.minimum((first_position + 1 - low) // keys, count - 1)
        if WINDOWED:
            whole = 0
        taken = done + turn
        buffer = turn % tiles_held * 2 + WHICH
        q = q_bufs.index(buffer)
        mbarrier.wait(q_full.index(buffer), (turn // tiles_held) & 1)
        _take_turn(turns, taken, WHICH)
        scores = _first_scores(done, q, ring, turns, WHICH, S)
        for i in range(whole):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * keys, scores, q, ring, turns, taken + 1 + i, position,
                window, factor, m, lanes, acc, DIM, False, WINDOWED, WHICH, S,
            )  # fmt: skip
        for i in range(whole, count):
            # The producer waits for the only buffer. Scores alone read it, and all are here.
            if tiles_held == 1:  # noqa: SIM102, one is for the compiler and one for the device
                if i + 1 == count:
                    thread_barrier()
                    mbarrier.arrive(q_empty.index(buffer), count=1)
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * keys, scores, q, ring, turns, taken + 1 + i, position,
                window, factor, m, lanes, acc, DIM, True, WINDOWED, WHICH, S,
            )  # fmt: skip
            if i + 1 < count:
                scores = _first_scores(done + i + 1, q, ring, turns, WHICH, S)
            else:
                _give_turn(turns, WHICH)
        for i in range(count, tile_count):
            # Only the other consumer's rows see these blocks.
            slot = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            mbarrier.wait(k_full.index(slot), phase)
            _free(k_empty, done + i)
            mbarrier.wait(v_full.index(slot), phase)
            _free(v_empty, done + i)
            _take_turn(turns, taken + 1 + i, WHICH)
            _give_turn(turns, WHICH)
        if tiles_held > 1:
            thread_barrier()
            mbarrier.arrive(q_empty.index(buffer), count=1)
        done += tile_count
        next_head = gl.load(_entry_of(gl.minimum(turn + 1, tiles_here - 1), place) + 2)
        next_start, next_len, next_limit, next_low, next_count = _extent(
            sequence, next_first, place, keys, GROUP, WINDOWED
        )
        write_rows(
            results, m, lanes, acc, (first, kv_head, start_row, q_len), strides, HEAD_DIM, GROUP,
            value_parts(DIM), own_stored_layout, OWN_LANES,
        )  # fmt: skip
        kv_head, first_row, start_row, q_len = next_head, next_first, next_start, next_len
        limit, low, tile_count = next_limit, next_low, next_count


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_hopper_kernel(
    Q, V, OUT, LSE, q_desc, k_desc, v_desc, tiles, num_tiles, query_start, query_len, context_len,
    window, factor, stride_qt, stride_qh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lse,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """o [T, H, HEAD_DIM] and lse [T, H] of the program's tiles, 128 rows of one KV head each.

    Columns from HEAD_DIM to DIM are zeros, which change no sum.

    Grid: one program per entry of `tiles`, or fewer that have several (`dealt_tiles`). Each
    consumer carries m [64], lanes [64, 8] and acc [64, DIM] over blocks in registers.
    """
    dtype: gl.constexpr = k_desc.dtype
    keys: gl.constexpr = k_desc.block_shape[0]
    # Of two consumers, and of two tiles where these fit.
    queries: gl.constexpr = 4 if DIM <= 128 else 2
    q_bufs = buffers(dtype, queries, CONSUMER_ROWS, DIM)
    k_bufs = buffers(dtype, STAGES, keys, DIM)
    v_bufs = buffers(dtype, STAGES * len(value_parts(DIM)), keys, value_parts(DIM)[0][1])
    q_full, q_empty = barriers(queries), barriers(queries)
    k_full, v_full, k_empty, v_empty = (
        barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES)
    )  # fmt: skip
    turns = barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(queries):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        # Both consumers read every block.
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    ring = (k_bufs, v_bufs, k_full, v_full, k_empty, v_empty)
    place = (tiles, num_tiles, query_start, query_len, context_len, window)
    fence_async_shared()
    # Registers of a thread: what the larger need of either side leaves least in memory.
    consumer: gl.constexpr = 232 if DIM > 128 or WINDOWED else 224
    producer: gl.constexpr = 504 - 2 * consumer
    results, strides = (OUT, LSE), (stride_ot, stride_oh, stride_lse)
    given = (results, (q_bufs, q_full, q_empty), ring, turns, place, factor, strides)
    gl.warp_specialize(
        [
            (_consume, (given, UPPER, GROUP, HEAD_DIM, DIM, WINDOWED)),
            (_consume, (given, LOWER, GROUP, HEAD_DIM, DIM, WINDOWED)),
            (_produce, (
                Q, V, q_desc, k_desc, v_desc, (q_bufs, q_full, q_empty), ring, place, stride_qt,
                stride_qh, stride_vt, stride_vh, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
        ],
        [4, 4],
        [consumer, producer],
    )  # fmt: skip


def attention_hopper_fwd(call: ForwardCall) -> None:
    """Fill o and lse for tiles of 128 rows."""
    q, k, v, keys, dim = call.q, call.k, call.v, call.plan.keys, call.plan.columns
    tokens, heads, queries = keys, 1, k
    if CONSUMER_ROWS.value % call.group == 0:
        tokens, heads, queries = CONSUMER_ROWS.value // call.group, call.group, q
    boxes = (
        head_descriptor(queries, tokens, heads, dim),
        head_descriptor(k, keys, 1, dim),
        head_descriptor(v, keys, 1, value_parts(dim)[0][1]),
    )
    programs = call.plan.tiles
    if call.layout.longest_context <= SHORT_KEYS:
        # A program loads the next of several short tiles while it stores the last one.
        programs = min(programs, sm_count(q.device))
    tiles = dealt_tiles(
        call.layout, q.device, call.group, call.kv_heads, keys, call.window, programs
    )
    attention_hopper_kernel[(programs,)](
        q, v, call.out, call.lse, *boxes, tiles, call.plan.tiles, *call.numbers,
        call.reach, call.factor, *q.stride()[:2], *v.stride()[:2], *call.result_strides,
        DIM=dim, num_warps=4, maxnreg=168, **call.shape, **OPTIONS,
    )  # fmt: skip
