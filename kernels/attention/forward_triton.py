"""The forward pass in Triton, for any GPU: each program walks over all keys of its tile.

A program owns a tile of rows of one KV head. Row r of a sequence is query r // group and head
r % group of the group, so heads that share keys share loads. `attention_fwd` picks the schedule of
a call, which may belong to `decode_triton` or `hopper`. All give the same bits: every sum is a
chain of matrix steps or an explicit tree.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention import schedules
from rl_consistency.kernels.attention.decode_triton import attention_split_fwd
from rl_consistency.kernels.attention.forward_call import ForwardCall
from rl_consistency.kernels.attention.forward_plan import plan_forward, reads_once
from rl_consistency.kernels.attention.hopper.decode import attention_decode_fwd
from rl_consistency.kernels.attention.hopper.decode_cut import Cut
from rl_consistency.kernels.attention.hopper.decode_prefix import attention_prefix_fwd
from rl_consistency.kernels.attention.hopper.forward import attention_hopper_fwd
from rl_consistency.kernels.attention.layout import AttentionLayout, PagedAttention
from rl_consistency.kernels.attention.schedules import PER_CALL, Schedule, key_block, lse_dtype
from rl_consistency.kernels.attention.shared_keys import MOST_SHARERS, SharedTables
from rl_consistency.kernels.attention.tiles_triton import (
    NEG_INF,
    addresses,
    block_sums,
    dense,
    finite,
    keys_of,
    load_rows,
    rows_of,
    sources,
    tile_of,
    write_rows,
)
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.grid import cdiv


@triton.jit
def _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED: tl.constexpr):
    """The running (m, lanes, acc) after one more block."""
    new_m = tl.maximum(m, block_m)
    shift = finite(new_m, MASKED)
    left = tl.exp2(m - shift)[:, None]
    right = tl.exp2(block_m - shift)[:, None]
    lanes = tl.fma(block_lanes, right, lanes * left)
    acc = tl.fma(block_acc, right, acc * left)
    return new_m, lanes, acc


@triton.jit
def _fold_keys(
    m, lanes, acc, q, position, low, high, window, factor, K, V, k_descriptor, v_descriptor, table,
    row0, head, limit, stride_kt, stride_kh, stride_vt, stride_vh, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running (m, lanes, acc) after the keys low .. high; `low` begins a block."""
    for start in tl.range(low, high, KEYS):
        k = load_rows(K, k_descriptor, table, start, row0, head, limit, stride_kt, stride_kh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        v = load_rows(V, v_descriptor, table, start, row0, head, limit, stride_vt, stride_vh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        block_m, block_lanes, block_acc = block_sums(
            q, k, v, position, start, window, factor, ROWS, KEYS, MASKED
        )
        m, lanes, acc = _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED)
    return m, lanes, acc


@triton.jit(do_not_specialize=PER_CALL)
def attention_fwd_kernel(
    Q, K, V, OUT, LSE, k_descriptor, v_descriptor, tiles, query_start, query_len, context_len,
    tables, window, factor, num_blocks, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt,
    stride_vh, stride_ot, stride_oh, stride_lse, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """o [T, H, HEAD_DIM] and lse [T, H] of one tile of ROWS rows of one KV head.

    Grid: tiles * KV heads. Carried over blocks of keys: m [ROWS], lanes [ROWS, 8], acc [ROWS, DIM].
    """
    sequence, kv_head, first_row, start_row, q_len, limit = tile_of(
        tiles, query_start, query_len, context_len, KV_HEADS
    )
    valid, token, head, position = rows_of(first_row, kv_head, q_len, limit - q_len, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    q = tl.load(
        addresses(Q, token_row, head[:, None], stride_qt, stride_qh, DIM),
        mask=valid[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    first_position, last_position, low = keys_of(
        first_row, q_len, limit, window, ROWS, GROUP, KEYS, WINDOWED
    )
    table = tables + sequence.to(tl.int64) * num_blocks
    m = tl.full((ROWS,), NEG_INF, tl.float32)
    lanes = tl.zeros((ROWS, 8), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    # Blocks that every row sees whole need no mask. Low tiles mask every block.
    full_low, full_high = low, tl.maximum((first_position + 1) // KEYS * KEYS, low)
    if ROWS <= 16:
        full_high = low
    if WINDOWED:
        edge = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS
        full_low = tl.minimum(edge, full_high)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        begin = low if part == 0 else full_low if part == 1 else full_high
        end = full_low if part == 0 else full_high if part == 1 else last_position + 1
        m, lanes, acc = _fold_keys(
            m, lanes, acc, q, position, begin, end, window, factor, K, V, k_descriptor,
            v_descriptor, table, start_row, kv_head, limit, stride_kt, stride_kh, stride_vt,
            stride_vh, BLOCK, ROWS, KEYS, HEAD_DIM, DIM, SOURCE, part != 1,
        )  # fmt: skip
    write_rows(
        OUT, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
        ROWS, HEAD_DIM, DIM,
    )  # fmt: skip


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    *,
    into: tuple[Tensor, Tensor] | None = None,
    schedule: Schedule | None = None,
    programs_per_tile: int | None = None,
    cut: Cut | None = None,
    shared_schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] and lse [T, H] in `lse_dtype`; rows that no sequence owns are 0 and -inf.

    `into` holds results of an earlier call for other sequences of the same rows: this call fills in
    those of its own. Tests and tuning give a `schedule`, the programs that share the key blocks of
    a tile of few rows, or the whole cut of a ring's tiles, and the schedule of keys that sequences
    share; none changes a bit.
    """
    q, k, v = (dense(x) for x in (q, k, v))
    rows, heads, head_dim = q.shape
    if into is None:
        out = q.new_empty(q.shape)
        lse = q.new_empty((rows, heads), dtype=lse_dtype(q.dtype))
        if not layout.owns(rows):
            out.zero_()
            lse.fill_(float("-inf"))
    else:
        out, lse = into
    group = heads // k.shape[1]
    most_rows = layout.most_queries * group
    if most_rows == 0:
        return out, lse
    plan = plan_forward(
        q, k, v, layout, window,
        schedule=schedule, programs_per_tile=programs_per_tile, cut=cut,
    )  # fmt: skip
    schedule, cut = plan.schedule, plan.cut
    device = q.device
    tables = layout.tables(device)
    call = ForwardCall(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        tiles=layout.tiles(device, group, schedule.rows),
        numbers=(tables.query_start, tables.query_len, tables.context_len),
        shared=tables.shared if cut is not None and reads_once(k, layout, window) else None,
        block_table=tables.block_table,
        block_size=layout.block_size if isinstance(layout, PagedAttention) else None,
        keys=key_block(head_dim),
        most_blocks=plan.most_blocks,
        stored=plan.stored,
        reach=schedules.reach(window),
        windowed=window is not None,
        settled=layout.settled,
        factor=scale * schedules.LOG2E,
    )
    if schedule.specialized:
        attention_hopper_fwd(call, layout, window)
    elif cut is not None:
        tickets = layout.tickets(device, plan.divided) if plan.divided else None
        sums = None
        if call.shared is not None:
            sums = _shared_sums(call, call.shared, layout, shared_schedule, programs_per_tile)
        attention_decode_fwd(call, schedule, cut, plan.slices, tickets, sums)
    elif plan.programs > 1:
        attention_split_fwd(call, schedule, plan.programs)
    else:
        _walk_fwd(call, schedule)
    return out, lse


def _shared_sums(
    call: ForwardCall,
    shared: SharedTables,
    layout: AttentionLayout,
    schedule: Schedule | None,
    programs: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of all rows after the keys that their sequences share."""
    assert isinstance(layout, PagedAttention)
    device, runs = call.q.device, shared.runs.shape[0]
    rows = layout.most_shared_queries() * call.group
    picked, likely_programs = schedules.pick_shared(
        rows,
        runs=runs,
        likely=cdiv(len(layout.query_lens), MOST_SHARERS),
        kv_heads=call.kv_heads,
        most_blocks=call.most_blocks,
        dim=call.dim,
        places=sm_count(device),
    )
    schedule = schedule or picked
    if schedule.rows > schedules.SPLIT_ROWS:
        programs = 1
    elif programs is None:
        programs = likely_programs
    tiles = cdiv(rows, schedule.rows)
    grid = runs * tiles * call.kv_heads
    tickets = layout.tickets(device, grid) if programs > 1 else None
    return attention_prefix_fwd(call, shared, schedule, tiles, programs, tickets)


def _walk_fwd(call: ForwardCall, schedule: Schedule) -> None:
    """Fill o and lse, one program for each tile."""
    paged = call.block_size is not None
    described = schedule.descriptors and not paged and schedules.describable(call.k, call.v)
    k, v = call.k, call.v
    attention_fwd_kernel[(call.grid,)](
        call.q, k, v, call.out, call.lse, *sources(described, [call.keys, 1, call.dim], k, v),
        call.tiles, *call.numbers, call.block_table, call.reach, call.factor,
        call.block_table.shape[1], *call.operand_strides, *call.result_strides,
        SOURCE=1 if paged else 2 if described else 0, BLOCK=call.block_size or 1,
        num_warps=schedule.warps, **call.constants(schedule),
    )  # fmt: skip
