"""Decode in Triton, for any GPU: programs share the key blocks of a tile of few rows.

One kernel writes every block's sums to memory. A second one folds a tile's blocks in their order:
each program takes some columns of a head, and each column is one chain of fused multiply-adds.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_consistency.kernels.attention.forward_call import ForwardCall
from rl_consistency.kernels.attention.schedules import PER_CALL, Schedule, scanned
from rl_consistency.kernels.attention.tiles_triton import (
    NEG_INF,
    addresses,
    block_sums,
    finite,
    keys_of,
    load_rows,
    rows_of,
    tile_of,
    write_rows,
)

AHEAD = 32
"""Blocks that a folding program reads at a time."""
COMBINED_COLUMNS = 8
"""Columns of a head that one program folds."""


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


def attention_split_fwd(call: ForwardCall, schedule: Schedule, programs: int) -> None:
    """Fill o and lse; `programs` programs share the key blocks of each tile."""
    written = call.memory_of_blocks(call.grid, call.stored)
    attention_block_kernel[(call.grid, programs)](
        call.q, call.k, call.v, *written, call.tiles, *call.numbers, call.block_table, call.reach,
        call.factor, call.block_table.shape[1], call.most_blocks, *call.operand_strides,
        STORED=call.stored, SOURCE=0 if call.block_size is None else 1, BLOCK=call.block_size or 1,
        num_warps=schedule.warps, **call.constants(schedule),
    )  # fmt: skip
    # A row of one tensor for both may not lie on 16 bytes: Triton would compile another kernel.
    left, right = (torch.empty_like(written[0]) for _ in range(2))
    columns = min(call.dim, COMBINED_COLUMNS)
    attention_combine_kernel[(call.grid, call.dim // columns)](
        call.out, call.lse, *written, left, right, call.tiles, *call.numbers, call.reach,
        call.most_blocks, *call.result_strides, STORED=call.stored, COLUMNS=columns, AHEAD=AHEAD,
        SCAN=scanned(call.most_blocks),
        num_warps=max(1, call.stored // 4), **call.constants(schedule),
    )  # fmt: skip
