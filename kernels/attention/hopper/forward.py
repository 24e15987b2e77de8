"""The forward pass on sm_90 with specialised warps, for packed sequences.

A program has three groups of warps. A producer (`forward_producer`) copies queries, keys and values
into shared memory. Two consumers own 64 rows of the tile each and take turns at the matrix unit. A
turn is the product of one block's probabilities and values, then the next block's scores; meanwhile
the other consumer computes its exponentials. The bits are those of `forward_triton`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_consistency.kernels.attention.forward_call import ForwardCall
from rl_consistency.kernels.attention.hopper.forward_producer import (
    CONSUMER_ROWS,
    KEYS,
    QUERY_BUFFERS,
    STAGES,
    count_tiles,
    extent,
    listed,
    produce,
    tile_index,
)
from rl_consistency.kernels.attention.hopper.tiles import (
    NEG_INF,
    OPTIONS,
    OWN_LANES,
    barriers,
    halve,
    head_descriptor,
    keep_seen,
    own_stored_layout,
    thread_barrier,
    write_rows,
)
from rl_consistency.kernels.attention.schedules import PER_CALL
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.remembered_launch import remembered

SHORT_KEYS = 8192
"""Longest context for which a program walks over several tiles; measured."""
UPPER, LOWER = gl.constexpr(0), gl.constexpr(1)


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
def _first_scores(done, q_buf, ring, turns, WHICH: gl.constexpr, S: gl.constexpr):
    """Scores [64, KEYS] of a block that `_consume_block` did not start."""
    k_bufs, _v_bufs, k_full, _v_full, k_empty, _v_empty = ring
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    scores = warpgroup_mma(
        q_buf, k_bufs.index(slot).permute([1, 0]), gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, S),
        use_acc=False, is_async=True,
    )  # fmt: skip
    _give_turn(turns, WHICH)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _free(k_empty, done)
    return scores


@gluon.jit
def _consume_block(
    done, start, scores, q_buf, ring, turns, taken, position, window, factor, m, lanes, acc,
    DIM: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr, WHICH: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """(next scores, m, lanes, acc) after folding the block of `scores`.

    An unmasked block is never the last: it computes the next block's scores. A masked one returns
    its own, which nothing reads.
    """
    k_bufs, v_bufs, k_full, v_full, k_empty, v_empty = ring
    dtype: gl.constexpr = v_bufs.dtype
    lane_layout: gl.constexpr = lanes.type.layout
    slot = done % STAGES
    if MASKED:
        scores = keep_seen(scores, position - start, window, KEYS, WINDOWED)
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
    block_acc = warpgroup_mma(
        rounded, v_bufs.index(slot), gl.zeros([CONSUMER_ROWS, DIM], gl.float32, P),
        use_acc=False, is_async=True,
    )  # fmt: skip
    # The row sums and the new maximum do not wait for the product.
    part = halve(halve(halve(halve(p, 64, 128), 64, 64), 64, 32), 64, 16)
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
    acc = acc * left_acc
    block_acc = warpgroup_mma_wait(0, deps=[block_acc])
    _free(v_empty, done)
    if MASKED:
        acc = gl.fma(block_acc, right_acc + gl.zeros_like(acc), acc)
    else:
        coming = (done + 1) % STAGES
        mbarrier.wait(k_full.index(coming), ((done + 1) // STAGES) & 1)
        following = warpgroup_mma(
            q_buf, k_bufs.index(coming).permute([1, 0]),
            gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, S), use_acc=False, is_async=True,
        )  # fmt: skip
        acc = gl.fma(block_acc, right_acc + gl.zeros_like(acc), acc)
        _give_turn(turns, WHICH)
        scores = warpgroup_mma_wait(0, deps=[following])
        _free(k_empty, done + 1)
    return scores, new_m, lanes, acc


@gluon.jit
def _consume(
    OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot, stride_oh,
    stride_lse, WHICH: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """One consumer, of rows 64 * WHICH .. of each tile: a turn for the first scores, then one for
    each block of keys."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    _k_bufs, _v_bufs, k_full, v_full, k_empty, v_empty = ring
    window = place[5]
    done = gl.to_tensor(0)
    tiles_here = count_tiles(place[1])
    kv_head, sequence, first_row = listed(tile_index(done), place, KV_HEADS)
    start_row, q_len, limit, low, tile_count = extent(sequence, first_row, place, GROUP, WINDOWED)
    for turn in range(tiles_here):
        # Read a tile ahead, for what is read with it while this tile's results are written.
        next_head, sequence, next_first = listed(
            tile_index(gl.minimum(turn + 1, tiles_here - 1)), place, KV_HEADS
        )
        past = limit - q_len
        first = first_row + WHICH * CONSUMER_ROWS
        own = first + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, S))
        position = past + own // GROUP
        m = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        lanes = gl.zeros([CONSUMER_ROWS, 8], gl.float32, L)
        acc = gl.zeros([CONSUMER_ROWS, DIM], gl.float32, P)
        first_position = past + first // GROUP
        last_position = gl.minimum(past + (first + CONSUMER_ROWS - 1) // GROUP, limit - 1)
        count = gl.minimum(gl.cdiv(last_position + 1 - low, KEYS), tile_count)
        # The last block counts as masked because no block follows it.
        whole = gl.minimum((first_position + 1 - low) // KEYS, count - 1)
        if WINDOWED:
            whole = 0
        taken = done + turn
        buffer = turn % QUERY_BUFFERS * 2 + WHICH
        q_buf = q_bufs.index(buffer)
        mbarrier.wait(q_full.index(buffer), (turn // QUERY_BUFFERS) & 1)
        _take_turn(turns, taken, WHICH)
        scores = _first_scores(done, q_buf, ring, turns, WHICH, S)
        for i in range(whole):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * KEYS, scores, q_buf, ring, turns, taken + 1 + i, position,
                window, factor, m, lanes, acc, DIM, False, WINDOWED, WHICH, S, P,
            )  # fmt: skip
        for i in range(whole, count):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * KEYS, scores, q_buf, ring, turns, taken + 1 + i, position,
                window, factor, m, lanes, acc, DIM, True, WINDOWED, WHICH, S, P,
            )  # fmt: skip
            if i + 1 < count:
                scores = _first_scores(done + i + 1, q_buf, ring, turns, WHICH, S)
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
        next_start, next_len, next_limit, next_low, next_count = extent(
            sequence, next_first, place, GROUP, WINDOWED
        )
        write_rows(
            OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh,
            stride_lse, HEAD_DIM, CONSUMER_ROWS, GROUP, DIM, own_stored_layout(DIM), OWN_LANES,
        )  # fmt: skip
        kv_head, first_row, start_row, q_len = next_head, next_first, next_start, next_len
        limit, low, tile_count = next_limit, next_low, next_count


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_hopper_kernel(
    Q, V, OUT, LSE, q_desc, k_desc, v_desc, tiles, num_tiles, query_start, query_len, context_len,
    window, factor, stride_qt, stride_qh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lse,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """o [T, H, HEAD_DIM] and lse [T, H] of the program's tiles, 128 rows of one KV head each.

    Columns from HEAD_DIM to DIM are zeros, which change no sum.

    Grid: one program per tile and KV head, or fewer that walk over them (`tile_index`). Each
    consumer carries m [64], lanes [64, 8] and acc [64, DIM] over blocks in registers.
    """
    dtype: gl.constexpr = k_desc.dtype
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMER_ROWS, DIM], dtype)
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2 * QUERY_BUFFERS, CONSUMER_ROWS, DIM], of_rows)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], of_keys)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], of_keys)
    q_full, q_empty = barriers(2 * QUERY_BUFFERS), barriers(2 * QUERY_BUFFERS)
    k_full, v_full, k_empty, v_empty = (
        barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES)
    )  # fmt: skip
    turns = barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(2 * QUERY_BUFFERS):
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
    gl.warp_specialize(
        [
            (_consume, (
                OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot,
                stride_oh, stride_lse, UPPER, KV_HEADS, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
            (_consume, (
                OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot,
                stride_oh, stride_lse, LOWER, KV_HEADS, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
            (produce, (
                Q, V, q_desc, k_desc, v_desc, q_bufs, q_full, q_empty, ring, place, stride_qt,
                stride_qh, stride_vt, stride_vh, KV_HEADS, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


def attention_hopper_fwd(call: ForwardCall, longest: int) -> None:
    """Fill o and lse for tiles of 128 rows; `longest` is the longest context."""
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    keys, values = (head_descriptor(x, KEYS.value, 1, call.dim) for x in (k, v))
    queries = keys
    if CONSUMER_ROWS.value % call.group == 0:
        queries = head_descriptor(q, CONSUMER_ROWS.value // call.group, call.group, call.dim)
    programs = call.grid
    if longest <= SHORT_KEYS:
        # A program loads the next of several short tiles while it stores the last one.
        programs = min(programs, sm_count(q.device))
    attention_hopper_kernel[(programs,)](
        q, v, out, lse, queries, keys, values, call.tiles, call.grid, *call.numbers, call.reach,
        call.factor, *q.stride()[:2], *v.stride()[:2], *call.result_strides,
        KV_HEADS=call.kv_heads, GROUP=call.group, HEAD_DIM=call.head_dim, DIM=call.dim,
        WINDOWED=call.windowed, num_warps=4, maxnreg=168, **OPTIONS,
    )  # fmt: skip
