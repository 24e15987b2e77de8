"""The forward pass in Triton, for any GPU, and the choice between it and the kernels of `hopper`.

Prefill: each program walks over all keys of its tile. A program owns a tile of rows of one KV head.
Row r of a sequence is query r // group and head r % group of the group, so heads that share keys
share loads.

Decode: programs share the key blocks of a tile of few rows. One kernel writes every block's sums to
memory. A second one folds a tile's blocks in their order: each program takes some columns of a
head, and each column is one chain of fused multiply-adds.

All give the same bits: every sum is a chain of matrix steps or an explicit tree.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.hopper.decode import attention_decode_fwd
from rl_consistency.kernels.attention.hopper.forward import attention_hopper_fwd
from rl_consistency.kernels.attention.hopper.shared_keys import attention_prefix_fwd
from rl_consistency.kernels.attention.layout import AttentionLayout
from rl_consistency.kernels.attention.schedules import (
    PER_CALL,
    describable,
    lse_dtype,
    plan_forward,
    scanned,
)
from rl_consistency.kernels.attention.tiles_triton import (
    NEG_INF,
    ForwardCall,
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

AHEAD = 32
"""Blocks that a folding program reads at a time."""
COMBINED_COLUMNS = 8
"""Columns of a head that one program folds."""


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


@triton.jit(do_not_specialize=PER_CALL)
def attention_block_kernel(
    Q, K, V, block_m, block_lanes, block_acc, tiles, query_start, query_len, context_len, tables,
    window, factor, num_blocks, slots, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt,
    stride_vh, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STORED: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of some key blocks of one tile; carries nothing from block to block.

    Writes block_m [tiles * KV heads, slots, STORED], block_lanes [.., 8] and block_acc [.., DIM].
    Grid: (tiles * KV heads, programs of a tile).
    """
    sequence, kv_head, first_row, start_row, q_len, limit = tile_of(
        tiles, query_start, query_len, context_len, KV_HEADS
    )
    valid, token, head, position = rows_of(first_row, kv_head, q_len, limit - q_len, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    dim = tl.arange(0, DIM)
    q = tl.load(
        addresses(Q, token_row, head[:, None], stride_qt, stride_qh, DIM),
        mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    _first, last_position, low = keys_of(
        first_row, q_len, limit, window, ROWS, GROUP, KEYS, WINDOWED
    )
    # A captured launch has one grid for all lengths: each program takes its share of blocks here.
    share = tl.cdiv(tl.cdiv(last_position + 1 - low, KEYS), tl.num_programs(1)) * KEYS
    begin = low + tl.program_id(1) * share
    end = tl.minimum(begin + share, last_position + 1)
    table = tables + sequence.to(tl.int64) * num_blocks
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, 8)
    stored = row < STORED
    for start in tl.range(begin, end, KEYS):
        k = load_rows(K, K, table, start, start_row, kv_head, limit, stride_kt, stride_kh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        v = load_rows(V, V, table, start, start_row, kv_head, limit, stride_vt, stride_vh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        m, lanes, acc = block_sums(q, k, v, position, start, window, factor, ROWS, KEYS, True)
        slot = tl.program_id(0).to(tl.int64) * slots + (start - low) // KEYS
        place = slot * STORED + row
        tl.store(block_m + place, m, mask=stored)
        tl.store(block_lanes + place[:, None] * 8 + lane[None, :], lanes, mask=stored[:, None])
        tl.store(block_acc + place[:, None] * DIM + dim[None, :], acc, mask=stored[:, None])


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _fold_ahead(
    lanes, acc, left, right, block_lanes, block_acc, count,
    STORED: tl.constexpr, DIM: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(lanes, acc) after the next AHEAD blocks, or the first `count` of them where MASKED.

    Constant offsets let all loads start at once.
    """
    for i in tl.static_range(AHEAD):
        if MASKED:
            # Past the last block the left factor is 1 and the summand is 0.
            inside = i < count
            a = tl.load(left + i * STORED, mask=inside, other=1.0)
            b = tl.load(right + i * STORED, mask=inside, other=0.0)
            block_l = tl.load(block_lanes + i * STORED * 8, mask=inside, other=0.0)
            block_a = tl.load(block_acc + i * STORED * DIM, mask=inside, other=0.0)
        else:
            a = tl.load(left + i * STORED)
            b = tl.load(right + i * STORED)
            block_l = tl.load(block_lanes + i * STORED * 8)
            block_a = tl.load(block_acc + i * STORED * DIM)
        lanes = tl.fma(block_l, b[:, None], lanes * a[:, None])
        acc = tl.fma(block_a, b[:, None], acc * a[:, None])
    return lanes, acc


@triton.jit(do_not_specialize=PER_CALL)
def attention_combine_kernel(
    OUT, LSE, block_m, block_lanes, block_acc, left, right, tiles, query_start, query_len,
    context_len, window, slots, stride_ot, stride_oh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STORED: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    WINDOWED: tl.constexpr, SCAN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """COLUMNS of o, and lse, of one tile from its written blocks, folded in order.

    Grid: (tiles * KV heads, DIM / COLUMNS). `left` and `right` [tiles * KV heads, slots, STORED]
    hold the factors of each fold.
    """
    _sequence, kv_head, first_row, start_row, q_len, limit = tile_of(
        tiles, query_start, query_len, context_len, KV_HEADS
    )
    first_column = tl.program_id(1) * COLUMNS
    _first, last_position, low = keys_of(
        first_row, q_len, limit, window, ROWS, GROUP, KEYS, WINDOWED
    )
    count = tl.cdiv(last_position + 1 - low, KEYS)
    row = tl.arange(0, STORED)
    lane = tl.arange(0, 8)
    column = first_column + tl.arange(0, COLUMNS)
    first_slot = tl.program_id(0).to(tl.int64) * slots
    # A running maximum is exact in any order, so the factors of all folds are computed at once.
    block = tl.arange(0, SCAN)
    cell = (first_slot + block)[None, :] * STORED + row[:, None]  # [STORED, SCAN]
    known = (block < count)[None, :]
    maxima = tl.load(block_m + cell, mask=known, other=NEG_INF)
    after_first = known & (block > 0)[None, :]
    earlier = tl.load(block_m + cell - STORED, mask=after_first, other=NEG_INF)
    before = tl.associative_scan(earlier, 1, _larger)
    shift = finite(tl.maximum(before, maxima), True)
    tl.store(left + cell, tl.exp2(before - shift), mask=known)
    tl.store(right + cell, tl.exp2(maxima - shift), mask=known)
    m = tl.max(maxima, 1)
    tl.debug_barrier()
    lanes = tl.zeros((STORED, 8), tl.float32)
    acc = tl.zeros((STORED, COLUMNS), tl.float32)
    place = first_slot * STORED + row
    left += place
    right += place
    lanes_at = block_lanes + place[:, None] * 8 + lane[None, :]
    acc_at = block_acc + place[:, None] * DIM + column[None, :]
    whole = count // AHEAD
    for _ in tl.range(0, whole):
        lanes, acc = _fold_ahead(
            lanes, acc, left, right, lanes_at, acc_at, AHEAD, STORED, DIM, AHEAD, False
        )
        left += AHEAD * STORED
        right += AHEAD * STORED
        lanes_at += AHEAD * STORED * 8
        acc_at += AHEAD * STORED * DIM
    lanes, acc = _fold_ahead(
        lanes, acc, left, right, lanes_at, acc_at, count - whole * AHEAD, STORED, DIM, AHEAD, True
    )
    valid, token, head, _position = rows_of(first_row, kv_head, q_len, limit - q_len, STORED, GROUP)
    token_row = (start_row + token).to(tl.int64)
    write_rows(
        OUT + first_column, LSE, m, lanes, acc, valid, token_row, head,
        stride_ot, stride_oh, stride_lse, STORED, HEAD_DIM - first_column, COLUMNS,
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
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] and lse [T, H] in `lse_dtype`; rows that no sequence owns are 0 and -inf.

    `into` holds results of an earlier call for other sequences of the same rows: this call fills in
    those of its own. What tests and tuning give `plan_forward` to choose with changes no bit.
    """
    q, k, v = (dense(x) for x in (q, k, v))
    if into is None:
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
        if not layout.owns(q.shape[0]):
            out.zero_()
            lse.fill_(float("-inf"))
    else:
        out, lse = into
    if layout.most_queries == 0:
        return out, lse
    plan = plan_forward(q, k, v, layout, window, **given)
    call = ForwardCall(
        q=q, k=k, v=v, out=out, lse=lse, layout=layout, scale=scale, window=window, plan=plan
    )
    if plan.schedule.specialized:
        attention_hopper_fwd(call)
    elif plan.cut is not None:
        attention_decode_fwd(call, plan.cut, attention_prefix_fwd(call) if plan.shared else None)
    elif plan.programs > 1:
        _split_fwd(call)
    else:
        _walk_fwd(call)
    return out, lse


def _walk_fwd(call: ForwardCall) -> None:
    """Fill o and lse, one program for each tile."""
    plan, k, v = call.plan, call.k, call.v
    paged, table = call.block_size is not None, call.tables.block_table
    described = plan.schedule.descriptors and not paged and describable(k, v)
    attention_fwd_kernel[(plan.tiles,)](
        call.q, k, v, call.out, call.lse, *sources(described, [plan.keys, 1, plan.columns], k, v),
        call.tiles, *call.numbers, table, call.reach, call.factor, table.shape[1],
        *call.operand_strides, *call.result_strides, SOURCE=1 if paged else 2 if described else 0,
        BLOCK=call.block_size or 1, num_warps=plan.schedule.warps, **call.constants(),
    )  # fmt: skip


def _split_fwd(call: ForwardCall) -> None:
    """Fill o and lse; `programs` programs share the key blocks of each tile."""
    plan, table = call.plan, call.tables.block_table
    written = call.memory_of_blocks(plan.tiles, plan.stored)
    attention_block_kernel[(plan.tiles, plan.programs)](
        call.q, call.k, call.v, *written, call.tiles, *call.numbers, table, call.reach, call.factor,
        table.shape[1], plan.most_blocks, *call.operand_strides, STORED=plan.stored,
        SOURCE=0 if call.block_size is None else 1, BLOCK=call.block_size or 1,
        num_warps=plan.schedule.warps, **call.constants(),
    )  # fmt: skip
    # A row of one tensor for both may not lie on 16 bytes: Triton would compile another kernel.
    left, right = (torch.empty_like(written[0]) for _ in range(2))
    columns = min(plan.columns, COMBINED_COLUMNS)
    attention_combine_kernel[(plan.tiles, plan.columns // columns)](
        call.out, call.lse, *written, left, right, call.tiles, *call.numbers, call.reach,
        plan.most_blocks, *call.result_strides, STORED=plan.stored, COLUMNS=columns, AHEAD=AHEAD,
        SCAN=scanned(plan.most_blocks), num_warps=max(1, plan.stored // 4), **call.constants(),
    )  # fmt: skip
