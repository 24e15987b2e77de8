"""The attention order on sm_90 with specialised warps: one schedule of the forward pass.

A producer (`attention_hopper_producer`) copies queries, keys and values into shared memory; two
consumers, each a warp group with 64 rows of the tile, take turns at the matrix unit: a turn is the
product of one block's probabilities and values, then the scores of the next block, and the other's
exponentials fill its time. Same sums as `attention_triton`: per block a chain of matrix steps and
the halving tree to eight lanes, then the left fold over blocks.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportIndexIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_consistency.kernels.attention.hopper.forward_producer import (
    CONSUMER_ROWS,
    KEYS,
    QUERY_BUFFERS,
    STAGES,
    count_tiles,
    produce,
    tile,
    tile_index,
)
from rl_consistency.kernels.attention.hopper.rows import NEG_INF, halve, write_rows
from rl_consistency.kernels.core.device import sm_count

SHORT_KEYS = 8192
"""Longest context for which programs are persistent; measured."""
TURNS = 2
"""When a consumer gives up the matrix unit: 0 there are no turns, 1 when its scores are there, 2
when they are under way."""
UPPER, LOWER = gl.constexpr(0), gl.constexpr(1)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _take_turn(turns, taken, WHICH: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the other consumer has given up the matrix unit; the upper one is first."""
    if TURNS:
        mbarrier.wait(turns.index(WHICH), (taken & 1) ^ (1 - WHICH))


@gluon.jit
def _give_turn(turns, WHICH: gl.constexpr, NOW: gl.constexpr):
    if NOW:
        gl.thread_barrier()
        mbarrier.arrive(turns.index(1 - WHICH), count=1)


@gluon.jit
def _free(empty, done):
    gl.thread_barrier()
    mbarrier.arrive(empty.index(done % STAGES), count=1)


@gluon.jit
def _first_scores(
    done, q_buf, k_bufs, k_full, k_empty, turns, WHICH: gl.constexpr, S: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Scores of a block that does not follow a whole one."""
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
    scores = warpgroup_mma(
        q_buf, k_bufs.index(slot).permute([1, 0]), gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, S),
        use_acc=False, is_async=True,
    )  # fmt: skip
    _give_turn(turns, WHICH, TURNS == 2)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _free(k_empty, done)
    _give_turn(turns, WHICH, TURNS == 1)
    return scores


@gluon.jit
def _consume_block(
    done, start, scores, q_buf, k_bufs, v_bufs, k_full, v_full, k_empty, v_empty, turns, taken,
    position, window, factor, m, lanes, acc, DIM: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr, WHICH: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Fold the block whose scores these are; the scores of the next one, which an unmasked block
    always has."""
    dtype: gl.constexpr = v_bufs.dtype
    lane_layout: gl.constexpr = lanes.type.layout
    slot = done % STAGES
    if MASKED:
        last = gl.expand_dims(position - start, 1)
        column = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, S)), 0)
        seen = column <= last
        if WINDOWED:
            seen = seen & (column > last - window)
        scores = gl.where(seen, scores, NEG_INF)
    block_m = gl.max(scores, axis=1) * factor
    shift = block_m
    if MASKED:
        shift = gl.where(block_m == NEG_INF, 0.0, block_m)
    p = gl.exp2(
        gl.fma(
            scores,
            factor + gl.zeros_like(scores),
            gl.expand_dims(-shift, 1) + gl.zeros_like(scores),
        )
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=P, k_width=2)
    rounded = gl.convert_layout(p.to(dtype), operand)
    mbarrier.wait(v_full.index(slot), (done // STAGES) & 1)
    _take_turn(turns, taken, WHICH, TURNS)
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
        _give_turn(turns, WHICH, TURNS == 2)
        scores = warpgroup_mma_wait(0, deps=[following])
        _free(k_empty, done + 1)
        _give_turn(turns, WHICH, TURNS == 1)
    return scores, new_m, lanes, acc


@gluon.jit
def _consume(
    OUT, LSE, q_bufs, k_bufs, v_bufs, q_full, k_full, v_full, q_empty, k_empty, v_empty, turns,
    tiles, num_tiles, query_start, query_len, context_len, window, factor, stride_ot, stride_oh,
    stride_lse, WHICH: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The rows 64 * WHICH .. of every tile, in one turn more than the tile has blocks."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    done = gl.to_tensor(0)
    for turn in range(count_tiles(num_tiles)):
        kv_head, first_row, start_row, q_len, limit, low, tile_count = tile(
            tile_index(turn), tiles, query_start, query_len, context_len, window, KV_HEADS, GROUP,
            WINDOWED,
        )  # fmt: skip
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
        # The last block is masked even where it need not be: the code after it has no next one.
        whole = gl.minimum((first_position + 1 - low) // KEYS, count - 1)
        if WINDOWED:
            whole = 0
        taken = done + turn
        buffer = turn % QUERY_BUFFERS * 2 + WHICH
        q_buf = q_bufs.index(buffer)
        mbarrier.wait(q_full.index(buffer), (turn // QUERY_BUFFERS) & 1)
        _take_turn(turns, taken, WHICH, TURNS)
        scores = _first_scores(done, q_buf, k_bufs, k_full, k_empty, turns, WHICH, S, TURNS)
        for i in range(whole):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * KEYS, scores, q_buf, k_bufs, v_bufs, k_full, v_full, k_empty,
                v_empty, turns, taken + 1 + i, position, window, factor, m, lanes, acc, DIM, False,
                WINDOWED, WHICH, S, P, TURNS,
            )  # fmt: skip
        for i in range(whole, count):
            scores, m, lanes, acc = _consume_block(
                done + i, low + i * KEYS, scores, q_buf, k_bufs, v_bufs, k_full, v_full, k_empty,
                v_empty, turns, taken + 1 + i, position, window, factor, m, lanes, acc, DIM, True,
                WINDOWED, WHICH, S, P, TURNS,
            )  # fmt: skip
            if i + 1 < count:
                scores = _first_scores(
                    done + i + 1, q_buf, k_bufs, k_full, k_empty, turns, WHICH, S, TURNS
                )
            else:
                _give_turn(turns, WHICH, TURNS > 0)
        for i in range(count, tile_count):
            # Blocks that only the other consumer's rows see.
            slot = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            mbarrier.wait(k_full.index(slot), phase)
            _free(k_empty, done + i)
            mbarrier.wait(v_full.index(slot), phase)
            _free(v_empty, done + i)
            _take_turn(turns, taken + 1 + i, WHICH, TURNS)
            _give_turn(turns, WHICH, TURNS > 0)
        gl.thread_barrier()
        mbarrier.arrive(q_empty.index(buffer), count=1)
        done += tile_count
        write_rows(
            OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh,
            stride_lse, CONSUMER_ROWS, GROUP, DIM,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["tiles", "num_tiles", "query_start", "query_len", "context_len", "window"]
)
def attention_hopper_kernel(
    Q, V, OUT, LSE, q_desc, k_desc, v_desc, tiles, num_tiles, query_start, query_len, context_len,
    window, factor, stride_qt, stride_qh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lse,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """This program's tiles, each 128 rows of one KV head, all its keys."""
    q_bufs = gl.allocate_shared_memory(
        k_desc.dtype, [2 * QUERY_BUFFERS, CONSUMER_ROWS, DIM],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_ROWS, DIM], k_desc.dtype),
    )  # fmt: skip
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, DIM], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * QUERY_BUFFERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * QUERY_BUFFERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(2 * QUERY_BUFFERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                OUT, LSE, q_bufs, k_bufs, v_bufs, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                turns, tiles, num_tiles, query_start, query_len, context_len, window, factor,
                stride_ot, stride_oh, stride_lse, UPPER, KV_HEADS, GROUP, DIM, WINDOWED, TURNS,
            )),
            (_consume, (
                OUT, LSE, q_bufs, k_bufs, v_bufs, q_full, k_full, v_full, q_empty, k_empty, v_empty,
                turns, tiles, num_tiles, query_start, query_len, context_len, window, factor,
                stride_ot, stride_oh, stride_lse, LOWER, KV_HEADS, GROUP, DIM, WINDOWED, TURNS,
            )),
            (produce, (
                Q, V, q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, k_full, v_full,
                q_empty, k_empty, v_empty, tiles, num_tiles, query_start, query_len, context_len,
                window, stride_qt, stride_qh, stride_vt, stride_vh, KV_HEADS, GROUP, DIM, WINDOWED,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


def takes(*tensors: Tensor) -> bool:
    """Whether operands [T, heads, D] fit: 16-bit, D 64 or 128, every token's heads in one row."""
    for x in tensors:
        (_, heads, head_dim), (token, head, element) = x.shape, x.stride()
        fits = (
            x.dtype in DTYPES
            and head_dim in (64, 128)
            and head == head_dim
            and element == 1
            and token >= heads * head_dim
            and x.data_ptr() % 16 == 0
            and token * x.itemsize % 16 == 0
        )
        if not fits:
            return False
    return True


def attention_hopper_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    window: int | None,
    reach: int,
    factor: float,
    longest: int,
) -> None:
    """Fill `out` and `lse` for the tiles of 128 rows."""
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    rows = [CONSUMER_ROWS.value // group, group, head_dim]
    columns = kv_heads * head_dim
    keys, values = (
        _descriptor(x, [x.shape[0], columns], [x.stride(0), 1], [KEYS.value, head_dim])
        for x in (k, v)
    )
    whole_tokens = CONSUMER_ROWS.value % group == 0
    queries = _descriptor(q, list(q.shape), list(q.stride()), rows) if whole_tokens else keys
    num_tiles = tiles.shape[0] * kv_heads
    # Many short tiles: one program walks over several, and loads the next while it stores the last.
    programs = min(num_tiles, sm_count(q.device)) if longest <= SHORT_KEYS else num_tiles
    attention_hopper_kernel[(programs,)](
        q, v, out, lse, queries, keys, values, tiles, num_tiles, *numbers, reach, factor,
        q.stride(0), q.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        lse.stride(0), KV_HEADS=kv_heads, GROUP=group, DIM=head_dim, WINDOWED=window is not None,
        TURNS=TURNS, num_warps=4, maxnreg=168, enable_fp_fusion=False,
    )  # fmt: skip


def _descriptor(
    x: Tensor, shape: list[int], strides: list[int], box: list[int]
) -> TensorDescriptor:
    return TensorDescriptor(x, shape, strides, box, boxed_layout(box, x.dtype))


_BOXED: dict[tuple[object, ...], gl.NVMMASharedLayout] = {}


def boxed_layout(box: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The shared layout that a box of a tensor is copied to, made once."""
    key = (*box, dtype)
    if key not in _BOXED:
        _BOXED[key] = gl.NVMMASharedLayout.get_default_for(box, DTYPES[dtype])
    return _BOXED[key]
