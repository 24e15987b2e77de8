"""The consumer warps of `hopper/forward.py`: scores, probabilities and sums of 64 rows of a tile.

The two consumers take turns at the matrix unit. A turn is the product of one block's probabilities
and values, then the next block's scores; meanwhile the other consumer computes its exponentials.
Values of a head above 128 come in parts of their columns, a product each: the sums of all columns
and of one whole block would not fit the registers.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.hopper.forward_producer import (
    CONSUMER_ROWS,
    STAGES,
    count_tiles,
    entry_of,
    extent,
)
from rl_consistency.kernels.attention.hopper.tiles import (
    NEG_INF,
    OWN_LANES,
    halve,
    keep_seen,
    own_stored_layout,
    thread_barrier,
    write_rows,
)


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
def _start_scores(done, q, ring, PARTS: gl.constexpr, S: gl.constexpr):
    """Start the scores [64, keys] of a block: one chain over the parts of the heads' columns."""
    k_bufs, _v_bufs, k_full, _v_full, _k_empty, _v_empty = ring
    keys: gl.constexpr = k_bufs.shape[1]
    apart: gl.constexpr = k_bufs.shape[0] // STAGES
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    scores = gl.zeros([CONSUMER_ROWS, keys], gl.float32, S)
    for part in gl.static_range(PARTS):
        scores = warpgroup_mma(
            q[part], k_bufs.index(slot * apart + part).permute([1, 0]), scores,
            use_acc=part > 0, is_async=True,
        )  # fmt: skip
    return scores


@gluon.jit
def _start_values(rounded, slot, v_bufs, PART: gl.constexpr, P: gl.constexpr):
    """Start the product of a block's probabilities and one part of the values' columns."""
    width: gl.constexpr = v_bufs.shape[2]
    apart: gl.constexpr = v_bufs.shape[0] // STAGES
    nothing = gl.zeros([CONSUMER_ROWS, width], gl.float32, P)
    return warpgroup_mma(
        rounded, v_bufs.index(slot * apart + PART), nothing, use_acc=False, is_async=True
    )


@gluon.jit
def _first_scores(done, q, ring, turns, WHICH: gl.constexpr, PARTS: gl.constexpr, S: gl.constexpr):
    """Scores [64, keys] of a block that `_consume_block` did not start."""
    scores = _start_scores(done, q, ring, PARTS, S)
    _give_turn(turns, WHICH)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _free(ring[4], done)
    return scores


@gluon.jit
def _consume_block(
    done, start, scores, q, ring, turns, taken, position, window, factor, m, lanes,
    acc, DIM: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr, WHICH: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """(next scores, m, lanes, acc) after folding the block of `scores`.

    An unmasked block is never the last: it computes the next block's scores. A masked one returns
    its own, which nothing reads.
    """
    k_bufs, v_bufs, _k_full, v_full, k_empty, v_empty = ring
    dtype: gl.constexpr = v_bufs.dtype
    keys: gl.constexpr = k_bufs.shape[1]
    parts: gl.constexpr = len(acc)
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
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=P, k_width=2)
    rounded = gl.convert_layout(p.to(dtype), operand)
    mbarrier.wait(v_full.index(slot), (done // STAGES) & 1)
    _take_turn(turns, taken, WHICH)
    coming = _start_values(rounded, slot, v_bufs, 0, P)
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
    left_acc = gl.expand_dims(gl.convert_layout(left, gl.SliceLayout(1, P)), 1)
    right_acc = gl.expand_dims(gl.convert_layout(right, gl.SliceLayout(1, P)), 1)
    folded = ()
    for i in gl.static_range(parts - 1):
        block_acc = coming
        coming = _start_values(rounded, slot, v_bufs, i + 1, P)
        scaled = acc[i] * left_acc
        block_acc = warpgroup_mma_wait(1, deps=[block_acc])
        scaled = gl.fma(block_acc, right_acc + gl.zeros_like(scaled), scaled)
        folded = folded + (_now(scaled),)
    scaled = acc[parts - 1] * left_acc
    block_acc = warpgroup_mma_wait(0, deps=[coming])
    _free(v_empty, done)
    if MASKED:
        last = gl.fma(block_acc, right_acc + gl.zeros_like(scaled), scaled)
    else:
        following = _start_scores(done + 1, q, ring, DIM // k_bufs.shape[2], S)
        last = gl.fma(block_acc, right_acc + gl.zeros_like(scaled), scaled)
        _give_turn(turns, WHICH)
        scores = warpgroup_mma_wait(0, deps=[following])
        _free(k_empty, done + 1)
    return scores, new_m, lanes, folded + (last,)


@gluon.jit
def consume(
    OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot, stride_oh,
    stride_lse, WHICH: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One consumer, of rows 64 * WHICH .. of each tile: a turn for the first scores, then one for
    each block of keys."""
    k_bufs, v_bufs, k_full, v_full, k_empty, v_empty = ring
    keys: gl.constexpr = k_bufs.shape[1]
    width: gl.constexpr = v_bufs.shape[2]
    parts: gl.constexpr = (HEAD_DIM + width - 1) // width
    score_parts: gl.constexpr = DIM // k_bufs.shape[2]
    tiles_held: gl.constexpr = q_full.shape[0] // 2
    q_apart: gl.constexpr = q_bufs.shape[0] // q_full.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
    P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    window = place[5]
    done = gl.to_tensor(0)
    tiles_here = count_tiles(place[1])
    entry = entry_of(done, place)
    sequence, first_row, kv_head = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    start_row, q_len, limit, low, tile_count = extent(
        sequence, first_row, place, keys, GROUP, WINDOWED
    )
    for turn in range(tiles_here):
        # Read a tile ahead, for what is read with it while this tile's results are written.
        entry = entry_of(gl.minimum(turn + 1, tiles_here - 1), place)
        sequence, next_first = gl.load(entry), gl.load(entry + 1)
        past = limit - q_len
        first = first_row + WHICH * CONSUMER_ROWS
        own = first + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, S))
        position = past + own // GROUP
        m = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        lanes = gl.zeros([CONSUMER_ROWS, 8], gl.float32, L)
        acc = ()
        for _ in gl.static_range(parts):
            acc = acc + (gl.zeros([CONSUMER_ROWS, width], gl.float32, P),)
        first_position = past + first // GROUP
        last_position = gl.minimum(past + (first + CONSUMER_ROWS - 1) // GROUP, limit - 1)
        count = gl.minimum(gl.cdiv(last_position + 1 - low, keys), tile_count)
        # The last block counts as masked because no block follows it.
        whole = gl.minimum((first_position + 1 - low) // keys, count - 1)
        if WINDOWED:
            whole = 0
        taken = done + turn
        buffer = turn % tiles_held * 2 + WHICH
        q = ()
        for part in gl.static_range(score_parts):
            q = q + (q_bufs.index(buffer * q_apart + part),)
        mbarrier.wait(q_full.index(buffer), (turn // tiles_held) & 1)
        _take_turn(turns, taken, WHICH)
        scores = _first_scores(done, q, ring, turns, WHICH, score_parts, S)
        for i in range(whole):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * keys, scores, q, ring, turns, taken + 1 + i, position,
                window, factor, m, lanes, acc, DIM, False, WINDOWED, WHICH, S, P,
            )  # fmt: skip
        for i in range(whole, count):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * keys, scores, q, ring, turns, taken + 1 + i, position,
                window, factor, m, lanes, acc, DIM, True, WINDOWED, WHICH, S, P,
            )  # fmt: skip
            if i + 1 < count:
                scores = _first_scores(done + i + 1, q, ring, turns, WHICH, score_parts, S)
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
        thread_barrier()
        mbarrier.arrive(q_empty.index(buffer), count=1)
        done += tile_count
        next_head = gl.load(entry_of(gl.minimum(turn + 1, tiles_here - 1), place) + 2)
        next_start, next_len, next_limit, next_low, next_count = extent(
            sequence, next_first, place, keys, GROUP, WINDOWED
        )
        for i in gl.static_range(parts):
            write_rows(
                OUT + i * width, LSE, m, lanes, acc[i], first, kv_head, start_row, q_len, stride_ot,
                stride_oh, stride_lse, HEAD_DIM - i * width, CONSUMER_ROWS, GROUP, width,
                own_stored_layout(width), OWN_LANES,
            )  # fmt: skip
        kv_head, first_row, start_row, q_len = next_head, next_first, next_start, next_len
        limit, low, tile_count = next_limit, next_low, next_count
