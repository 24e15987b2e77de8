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

from rl_consistency.kernels.attention.forward_call import ForwardCall
from rl_consistency.kernels.attention.hopper.forward_consumer import consume
from rl_consistency.kernels.attention.hopper.forward_producer import (
    CONSUMER_ROWS,
    STAGES,
    produce,
)
from rl_consistency.kernels.attention.hopper.forward_tiles import Deal
from rl_consistency.kernels.attention.hopper.tiles import OPTIONS, barriers, head_descriptor
from rl_consistency.kernels.attention.layout import AttentionLayout
from rl_consistency.kernels.attention.schedules import PER_CALL, hopper_columns
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.remembered_launch import remembered

SHORT_KEYS = 8192
"""Longest context for which a program walks over several tiles; measured."""
WIDE = 32
"""Columns of the values that one product of a head above 128 takes: two such products, the sums of
256 columns and the probabilities fit the registers. With 64 columns more is spilled, and 1,024
tokens of 8 heads of 256 take 200 us in place of 193 (H100)."""
NARROW = 32
"""Columns in one part of a head of 65 to 96: three parts, since no buffer has 96."""
UPPER, LOWER = gl.constexpr(0), gl.constexpr(1)


@gluon.constexpr_function
def room_for(parts: int) -> int:
    """Buffers that hold the parts of a block: a power of two."""
    return 4 if parts == 3 else parts


@remembered
@gluon.jit(do_not_specialize=PER_CALL)
def attention_hopper_kernel(
    Q, V, OUT, LSE, q_desc, k_desc, v_desc, tiles, num_tiles, query_start, query_len, context_len,
    window, factor, stride_qt, stride_qh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lse,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """o [T, H, HEAD_DIM] and lse [T, H] of the program's tiles, 128 rows of one KV head each.

    Columns from HEAD_DIM to DIM are zeros, which change no sum.

    Grid: one program per entry of `tiles`, or fewer that have several (`forward_tiles`). Each
    consumer carries m [64], lanes [64, 8] and acc [64, DIM] over blocks in registers.
    """
    dtype: gl.constexpr = k_desc.dtype
    keys: gl.constexpr = k_desc.block_shape[0]
    k_width: gl.constexpr = k_desc.block_shape[2]
    v_width: gl.constexpr = v_desc.block_shape[2]
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMER_ROWS, k_width], dtype)
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([keys, k_width], dtype)
    of_values: gl.constexpr = gl.NVMMASharedLayout.get_default_for([keys, v_width], dtype)
    # Of two consumers, and of two tiles where these fit.
    queries: gl.constexpr = 4 if DIM <= 128 else 2
    k_parts: gl.constexpr = room_for(DIM // k_width)
    v_parts: gl.constexpr = room_for(DIM // v_width)
    q_bufs = gl.allocate_shared_memory(dtype, [queries * k_parts, CONSUMER_ROWS, k_width], of_rows)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES * k_parts, keys, k_width], of_keys)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES * v_parts, keys, v_width], of_values)
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
    producer: gl.constexpr = 40 if DIM > 128 or WINDOWED else 56
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
                Q, V, q_desc, k_desc, v_desc, q_bufs, q_full, q_empty, ring, place, stride_qt,
                stride_qh, stride_vt, stride_vh, GROUP, HEAD_DIM, DIM, WINDOWED,
            )),
        ],
        [4, 4],
        [consumer, producer],
    )  # fmt: skip


def attention_hopper_fwd(call: ForwardCall, layout: AttentionLayout, window: int | None) -> None:
    """Fill o and lse for tiles of 128 rows."""
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    dim = hopper_columns(call.head_dim)
    k_width = NARROW if dim == 96 else dim
    keys = head_descriptor(k, call.keys, 1, k_width)
    values = head_descriptor(v, call.keys, 1, WIDE if dim == 256 else k_width)
    queries = keys
    if CONSUMER_ROWS.value % call.group == 0:
        queries = head_descriptor(q, CONSUMER_ROWS.value // call.group, call.group, k_width)
    programs = call.grid
    if layout.longest_context <= SHORT_KEYS:
        # A program loads the next of several short tiles while it stores the last one.
        programs = min(programs, sm_count(q.device))
    deal = Deal(layout, call.group, call.kv_heads, call.keys, window, programs)
    attention_hopper_kernel[(programs,)](
        q, v, out, lse, queries, keys, values, deal.on(q.device), call.grid, *call.numbers,
        call.reach, call.factor, *q.stride()[:2], *v.stride()[:2], *call.result_strides,
        GROUP=call.group, HEAD_DIM=call.head_dim, DIM=dim, WINDOWED=call.windowed, num_warps=4,
        maxnreg=168, **OPTIONS,
    )  # fmt: skip
