"""The consumer warps of `hopper/forward.py`: scores, probabilities and sums of 64 rows of a tile.

The two consumers take turns at the matrix unit. A turn is the product of one block's probabilities
and values, then the next block's scores; meanwhile the other consumer computes its exponentials.
The columns of a head are held in parts (`head_parts`), and values have a product for each. Those of
a head above 128 start one after another: the sums of all columns and of one whole block would not
fit the registers.
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
    used_parts,
    value_parts,
    values_at,
)
from rl_consistency.kernels.attention.hopper.head_parts import buffer_at, finished, start_scores
from rl_consistency.kernels.attention.hopper.tiles import (
    NEG_INF,
    OWN_LANES,
    finish_rows,
    halve,
    keep_seen,
    own_stored_layout,
    places_of,
    thread_barrier,
    write_columns,
    write_lse,
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
def _start_scores(done, q, ring, S: gl.constexpr):
    """Start the scores [64, keys] of a block."""
    k_bufs, _v_bufs, k_full, _v_full, _k_empty, _v_empty = ring
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    return start_scores(q, buffer_at(k_bufs, slot), S)


@gluon.constexpr_function
def _sums_layout(columns):
    """The layout of sums [64, columns] of the values."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _no_sums(DIM: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Sums of the values that are zero."""
    PARTS: gl.constexpr = value_parts(DIM)
    made = ()
    for i in gl.static_range(used_parts(DIM, HEAD_DIM)):
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
        p[PART], values_at(v_bufs, slot, PART), nothing, use_acc=False, is_async=True
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
    keys: gl.constexpr = k_bufs[0].shape[1]
    # Products whose sums the registers hold beside those of all blocks before.
    held: gl.constexpr = len(acc) if DIM <= 128 else 1
    early: gl.constexpr = len(acc) - held
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
    rounded = _operands(p.to(v_bufs[0].dtype), acc)
    mbarrier.wait(v_full.index(slot), (done // STAGES) & 1)
    _take_turn(turns, taken, WHICH)
    coming = ()
    for i in gl.static_range(held):
        coming = coming + (_start_values(rounded, slot, v_bufs, acc, i),)
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
        block_acc = coming[0]
        coming = (_start_values(rounded, slot, v_bufs, acc, i + 1),)
        scaled = acc[i] * left[i]
        block_acc = warpgroup_mma_wait(1, deps=[block_acc])
        scaled = gl.fma(block_acc, right[i] + gl.zeros_like(scaled), scaled)
        folded = folded + (_now(scaled),)
    scaled = ()
    for i in gl.static_range(held):
        scaled = scaled + (acc[early + i] * left[early + i],)
    coming = finished(coming, 0)
    _free(v_empty, done)
    if not MASKED:
        following = _start_scores(done + 1, q, ring, S)
    for i in gl.static_range(held):
        share = right[early + i] + gl.zeros_like(scaled[i])
        folded = folded + (gl.fma(coming[i], share, scaled[i]),)
    if not MASKED:
        _give_turn(turns, WHICH)
        scores = warpgroup_mma_wait(0, deps=[following])
        _free(k_empty, done + 1)
    return scores, new_m, lanes, folded


@gluon.jit
def _write_results(
    OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh, stride_lse,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """o and lse of this consumer's rows, first .. of a sequence; see `write_rows`."""
    PARTS: gl.constexpr = value_parts(DIM)
    out, lse = finish_rows(m, lanes, acc, OWN_LANES)
    for i in gl.static_range(len(out)):
        places = places_of(
            out[i], first, kv_head, start_row, q_len, GROUP, own_stored_layout(PARTS[i][1])
        )
        write_columns(
            OUT + PARTS[i][0], out[i], places, stride_ot, stride_oh, HEAD_DIM - PARTS[i][0],
            own_stored_layout(PARTS[i][1]),
        )  # fmt: skip
        if i == 0:
            write_lse(LSE, lse, places, stride_lse, own_stored_layout(PARTS[i][1]))


@gluon.jit
def consume(
    OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot, stride_oh,
    stride_lse, WHICH: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One consumer, of rows 64 * WHICH .. of each tile: a turn for the first scores, then one for
    each block of keys."""
    k_bufs, _v_bufs, k_full, v_full, k_empty, v_empty = ring
    keys: gl.constexpr = k_bufs[0].shape[1]
    tiles_held: gl.constexpr = q_full.shape[0] // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
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
        q = buffer_at(q_bufs, buffer)
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
        next_head = gl.load(entry_of(gl.minimum(turn + 1, tiles_here - 1), place) + 2)
        next_start, next_len, next_limit, next_low, next_count = extent(
            sequence, next_first, place, keys, GROUP, WINDOWED
        )
        _write_results(
            OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh,
            stride_lse, GROUP, HEAD_DIM, DIM,
        )  # fmt: skip
        kv_head, first_row, start_row, q_len = next_head, next_first, next_start, next_len
        limit, low, tile_count = next_limit, next_low, next_count
