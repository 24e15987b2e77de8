"""The forward pass on sm_90 with specialised warps, for packed sequences.

A program has three groups of warps. A producer (`forward_producer`) copies queries, keys and values
into shared memory. Two consumers (`forward_consumer`) own 64 rows of the tile each. The bits are
those of `forward_triton`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rl_consistency.kernels.attention.hopper.forward_consumer import consume
from rl_consistency.kernels.attention.hopper.forward_producer import (
    CONSUMER_ROWS,
    STAGES,
    produce,
    value_parts,
)
from rl_consistency.kernels.attention.hopper.forward_tiles import Deal
from rl_consistency.kernels.attention.hopper.head_parts import buffers, parts_of
from rl_consistency.kernels.attention.hopper.tiles import OPTIONS, barriers, head_descriptor
from rl_consistency.kernels.attention.schedules import PER_CALL
from rl_consistency.kernels.attention.tiles_triton import ForwardCall
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.remembered_launch import remembered

SHORT_KEYS = 8192
"""Longest context for which a program walks over several tiles; measured."""
UPPER, LOWER = gl.constexpr(0), gl.constexpr(1)


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_hopper_kernel(
    Q, V, OUT, LSE, q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, tiles, num_tiles, query_start,
    query_len, context_len, window, factor, stride_qt, stride_qh, stride_vt, stride_vh, stride_ot,
    stride_oh, stride_lse, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """o [T, H, HEAD_DIM] and lse [T, H] of the program's tiles, 128 rows of one KV head each.

    Columns from HEAD_DIM to DIM are zeros, which change no sum. The descriptors `*_rest` are of the
    second part of the columns, None where there is one part.

    Grid: one program per entry of `tiles`, or fewer that have several (`forward_tiles`). Each
    consumer carries m [64], lanes [64, 8] and acc [64, DIM] over blocks in registers.
    """
    dtype: gl.constexpr = k_desc.dtype
    keys: gl.constexpr = k_desc.block_shape[0]
    # Of two consumers, and of two tiles where these fit.
    queries: gl.constexpr = 4 if DIM <= 128 else 2
    q_descs, k_descs, v_descs = (q_desc,), (k_desc,), (v_desc,)
    if q_rest is not None:
        q_descs, k_descs, v_descs = (q_desc, q_rest), (k_desc, k_rest), (v_desc, v_rest)
    q_bufs = buffers(dtype, queries, CONSUMER_ROWS, DIM)
    k_bufs = buffers(dtype, STAGES, keys, DIM)
    if DIM <= 128:
        v_bufs = buffers(dtype, STAGES, keys, DIM)
    else:
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
    # Registers of a thread: what the larger need of either side leaves least in memory. The
    # producer needs more for two parts.
    consumer: gl.constexpr = 232 if DIM > 128 or WINDOWED else 224 if len(k_bufs) == 1 else 208
    producer: gl.constexpr = 504 - 2 * consumer
    gl.warp_specialize(
        [
            (consume, (
                OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot,
                stride_oh, stride_lse, UPPER, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
            (consume, (
                OUT, LSE, q_bufs, q_full, q_empty, ring, turns, place, factor, stride_ot,
                stride_oh, stride_lse, LOWER, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
            (produce, (
                Q, V, q_descs, k_descs, v_descs, q_bufs, q_full, q_empty, ring, place, stride_qt,
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
    boxes = [
        (
            head_descriptor(queries, tokens, heads, columns),
            head_descriptor(k, keys, 1, columns),
            head_descriptor(v, keys, 1, value_parts(dim)[i][1]),
        )
        for i, (_, columns) in enumerate(parts_of(dim))
    ]
    boxes, rest = [*boxes, (None, None, None)][:2]
    programs = call.plan.tiles
    if call.layout.longest_context <= SHORT_KEYS:
        # A program loads the next of several short tiles while it stores the last one.
        programs = min(programs, sm_count(q.device))
    deal = Deal(call.layout, call.group, call.kv_heads, keys, call.window, programs)
    attention_hopper_kernel[(programs,)](
        q, v, call.out, call.lse, *boxes, *rest, deal.on(q.device), call.plan.tiles, *call.numbers,
        call.reach, call.factor, *q.stride()[:2], *v.stride()[:2], *call.result_strides,
        GROUP=call.group, HEAD_DIM=call.head_dim, DIM=dim, WINDOWED=call.windowed, num_warps=4,
        maxnreg=168, **OPTIONS,
    )  # fmt: skip
