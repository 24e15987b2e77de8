"""Triton schedules of the attention order: prefill, chunked prefill, paged decode, and backward.

A program owns a tile of rows of one KV head: row r of a sequence is query r // group, head
r % group of the group, so the heads that share keys share their loads. Tiles of any height, keys
read through a descriptor, by pointer or from a paged cache, parts of a long context one after
another or side by side: all give the same bits, because every sum is either a chain of matrix steps
or an explicit tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_consistency.kernels import attention_hopper
from rl_consistency.kernels.attention_layout import AttentionLayout, PackedSequences, PagedAttention
from rl_consistency.kernels.cuda_device import has_tma, sm_count
from rl_consistency.kernels.tree_fold import fold_to_lanes, tree_fold

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
POINTER, PAGED, DESCRIPTOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def key_block(head_dim: int) -> int:
    """Keys in one step of the softmax fold on CUDA; part of the order."""
    return 128 if head_dim <= 128 else 64


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a pass is cut into programs; every field is neutral to the bits."""

    rows: int
    """Rows of a program's tile."""
    keys: int = 0
    """Keys of a backward tile; the forward pass takes the order's key block."""
    warps: int
    stages: int
    descriptors: bool = False
    """Whether packed keys are read through tensor descriptors (sm_90)."""
    specialized: bool = False
    """Whether warps are specialised (`attention_hopper`, sm_90)."""


PREFILL = (
    Schedule(rows=128, warps=12, stages=2, descriptors=True, specialized=True),
    Schedule(rows=128, warps=8, stages=2, descriptors=True),
    Schedule(rows=128, warps=8, stages=3, descriptors=True),
    Schedule(rows=128, warps=8, stages=2),
    Schedule(rows=64, warps=4, stages=2),
    Schedule(rows=64, warps=4, stages=1),
    Schedule(rows=16, warps=4, stages=2),
    Schedule(rows=16, warps=2, stages=1),
)
DECODE = (
    Schedule(rows=16, warps=4, stages=4),
    Schedule(rows=16, warps=4, stages=5),
    Schedule(rows=16, warps=8, stages=4),
    Schedule(rows=16, warps=8, stages=5),
    Schedule(rows=16, warps=4, stages=2),
    Schedule(rows=64, warps=4, stages=3),
    Schedule(rows=16, warps=2, stages=1),
)
BACKWARD_QUERIES = (
    Schedule(rows=128, keys=64, warps=8, stages=3, descriptors=True),
    Schedule(rows=128, keys=64, warps=8, stages=2, descriptors=True),
    Schedule(rows=128, keys=128, warps=8, stages=2, descriptors=True),
    Schedule(rows=64, keys=128, warps=4, stages=2, descriptors=True),
    Schedule(rows=128, keys=64, warps=8, stages=2),
    Schedule(rows=64, keys=64, warps=4, stages=2),
    Schedule(rows=32, keys=32, warps=4, stages=1),
)
BACKWARD_KEYS = (
    Schedule(rows=64, keys=128, warps=8, stages=2, descriptors=True),
    Schedule(rows=64, keys=128, warps=8, stages=3, descriptors=True),
    Schedule(rows=32, keys=128, warps=8, stages=3, descriptors=True),
    Schedule(rows=64, keys=64, warps=4, stages=2, descriptors=True),
    Schedule(rows=64, keys=64, warps=4, stages=2),
    Schedule(rows=32, keys=128, warps=8, stages=2),
    Schedule(rows=32, keys=32, warps=4, stages=1),
)


@triton.jit
def _rows_of(first_row, pid_head, query_len, past, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(valid, token in the sequence, head, position) of a tile's rows, each [ROWS]."""
    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP
    return row < query_len * GROUP, token, pid_head * GROUP + row % GROUP, past + token


@triton.jit
def _load_rows(
    base, descriptor, table, start, row0, head, limit, stride_row, stride_head, block_size,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows `start .. start + KEYS` of one sequence and head, [KEYS, DIM]; past `limit` zeros."""
    if SOURCE == 2 and not MASKED:
        # Rows past the sequence are never in an unmasked block.
        tile = descriptor.load([row0 + start, head, 0])
        return tl.reshape(tile, (KEYS, DIM))
    key = start + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    if SOURCE == 1:
        inside = key < limit
        block = tl.load(table + key // block_size, mask=inside, other=0)
        row = block.to(tl.int64) * block_size + key % block_size
    else:
        row = (row0 + key).to(tl.int64)
    pointer = base + row[:, None] * stride_row + head * stride_head + dim[None, :]
    if MASKED or SOURCE == 1:
        mask = (key < limit)[:, None] & (dim < HEAD_DIM)[None, :]
        return tl.load(pointer, mask=mask, other=0.0)
    if HEAD_DIM != DIM:
        return tl.load(pointer, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointer)


@triton.jit
def _visible(query, key, window):
    """Whether a query sees a key, both broadcast against each other."""
    distance = query - key
    return (distance >= 0) & (distance < window)


@triton.jit
def _block(
    q, k, v, position, start, window, factor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block on its own: m [ROWS] in log2 units, lanes [ROWS, 8], acc [ROWS, DIM]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
    if MASKED:
        key = start + tl.arange(0, KEYS)
        scores = tl.where(_visible(position[:, None], key[None, :], window), scores, NEG_INF)
    m = tl.max(scores, 1) * factor
    p = tl.exp2(tl.fma(scores, factor, -_finite(m, MASKED)[:, None]))
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m, fold_to_lanes(p, ROWS, KEYS), acc


@triton.jit
def _finite(m, MASKED: tl.constexpr):
    """m, or 0 for a row that has seen no key, from which -inf can be subtracted."""
    if MASKED:
        m = tl.where(m == NEG_INF, 0.0, m)
    return m


@triton.jit
def _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED: tl.constexpr):
    """Fold one more block into the running (m, lanes, acc)."""
    new_m = tl.maximum(m, block_m)
    shift = _finite(new_m, MASKED)
    left = tl.exp2(m - shift)[:, None]
    right = tl.exp2(block_m - shift)[:, None]
    lanes = tl.fma(block_lanes, right, lanes * left)
    acc = tl.fma(block_acc, right, acc * left)
    return new_m, lanes, acc


@triton.jit
def _fold_keys(
    m, lanes, acc, q, position, low, high, window, factor,
    K, V, k_descriptor, v_descriptor, table, row0, head, limit,
    stride_kt, stride_kh, stride_vt, stride_vh, block_size,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the blocks of keys low .. high, low on a block."""
    for start in tl.range(low, high, KEYS):
        k = _load_rows(K, k_descriptor, table, start, row0, head, limit, stride_kt, stride_kh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        v = _load_rows(V, v_descriptor, table, start, row0, head, limit, stride_vt, stride_vh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        block_m, block_lanes, block_acc = _block(
            q, k, v, position, start, window, factor, ROWS, KEYS, DIM, MASKED
        )
        m, lanes, acc = _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED)
    return m, lanes, acc


@triton.jit
def _write_rows(
    O, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
    ROWS: tl.constexpr, HEAD_DIM, DIM: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, DIM)
    length = tree_fold(lanes, ROWS, 8)
    seen = length > 0
    out = acc * tl.div_rn(1.0, tl.where(seen, length, 1.0))[:, None] + 0.0
    pointer = O + token_row[:, None] * stride_ot + head[:, None] * stride_oh + dim[None, :]
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointer, out.to(O.dtype.element_ty), mask=mask)
    lse = tl.where(seen, (m + tl.log2(length)) * LN2, NEG_INF)
    tl.store(LSE + token_row * stride_lse + head, lse, mask=valid)


@triton.jit
def attention_fwd_kernel(
    Q, K, V, O, LSE, k_descriptor, v_descriptor,
    tiles, query_start, query_len, context_len, tables,
    window, factor, block_size, num_blocks,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head, all its keys."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    q_len = tl.load(query_len + sequence)
    limit = tl.load(context_len + sequence)
    start_row = tl.load(query_start + sequence)
    valid, token, head, position = _rows_of(first_row, kv_head, q_len, limit - q_len, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    dim = tl.arange(0, DIM)
    pointer = Q + token_row[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(pointer, mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    first_position = limit - q_len + first_row // GROUP
    last_position = tl.minimum(limit - q_len + (first_row + ROWS - 1) // GROUP, limit - 1)
    low = 0
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    table = tables + sequence.to(tl.int64) * num_blocks
    m = tl.full((ROWS,), NEG_INF, tl.float32)
    lanes = tl.zeros((ROWS, 8), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    # Blocks that every row sees whole need no mask.
    full_high = tl.maximum((first_position + 1) // KEYS * KEYS, low)
    full_low = low
    if WINDOWED:
        edge = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS
        full_low = tl.minimum(edge, full_high)
        m, lanes, acc = _fold_keys(
            m, lanes, acc, q, position, low, full_low, window, factor,
            K, V, k_descriptor, v_descriptor, table, start_row, kv_head, limit,
            stride_kt, stride_kh, stride_vt, stride_vh, block_size,
            ROWS, KEYS, HEAD_DIM, DIM, SOURCE, True,
        )  # fmt: skip
    m, lanes, acc = _fold_keys(
        m, lanes, acc, q, position, full_low, full_high, window, factor,
        K, V, k_descriptor, v_descriptor, table, start_row, kv_head, limit,
        stride_kt, stride_kh, stride_vt, stride_vh, block_size,
        ROWS, KEYS, HEAD_DIM, DIM, SOURCE, False,
    )  # fmt: skip
    m, lanes, acc = _fold_keys(
        m, lanes, acc, q, position, full_high, last_position + 1, window, factor,
        K, V, k_descriptor, v_descriptor, table, start_row, kv_head, limit,
        stride_kt, stride_kh, stride_vt, stride_vh, block_size,
        ROWS, KEYS, HEAD_DIM, DIM, SOURCE, True,
    )  # fmt: skip
    _write_rows(
        O, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
        ROWS, HEAD_DIM, DIM,
    )  # fmt: skip


@triton.jit
def attention_block_kernel(
    Q, K, V, block_m, block_lanes, block_acc,
    tiles, query_start, query_len, context_len, tables,
    window, factor, block_size, num_blocks, slots, blocks_per_program,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STORED: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Some key blocks of one tile, each written out on its own."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    q_len = tl.load(query_len + sequence)
    limit = tl.load(context_len + sequence)
    start_row = tl.load(query_start + sequence)
    valid, token, head, position = _rows_of(first_row, kv_head, q_len, limit - q_len, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    dim = tl.arange(0, DIM)
    pointer = Q + token_row[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(pointer, mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    low = 0
    if WINDOWED:
        low = tl.maximum(limit - q_len + first_row // GROUP - window + 1, 0) // KEYS * KEYS
    last_position = tl.minimum(limit - q_len + (first_row + ROWS - 1) // GROUP, limit - 1)
    begin = low + tl.program_id(1) * blocks_per_program * KEYS
    end = tl.minimum(begin + blocks_per_program * KEYS, last_position + 1)
    table = tables + sequence.to(tl.int64) * num_blocks
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, 8)
    stored = row < STORED
    for start in tl.range(begin, end, KEYS):
        k = _load_rows(K, K, table, start, start_row, kv_head, limit, stride_kt, stride_kh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        v = _load_rows(V, V, table, start, start_row, kv_head, limit, stride_vt, stride_vh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        m, lanes, acc = _block(
            q, k, v, position, start, window, factor, ROWS, KEYS, DIM, True
        )
        slot = tl.program_id(0).to(tl.int64) * slots + (start - low) // KEYS
        place = slot * STORED + row
        tl.store(block_m + place, m, mask=stored)
        tl.store(block_lanes + place[:, None] * 8 + lane[None, :], lanes, mask=stored[:, None])
        tl.store(block_acc + place[:, None] * DIM + dim[None, :], acc, mask=stored[:, None])


@triton.jit
def attention_combine_kernel(
    O, LSE, block_m, block_lanes, block_acc, tiles, query_start, query_len, context_len,
    window, slots, stride_ot, stride_oh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STORED: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    WINDOWED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Fold the blocks of one tile in order, for COLUMNS of the head's dimensions."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    first_column = tl.program_id(1) * COLUMNS
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    q_len = tl.load(query_len + sequence)
    limit = tl.load(context_len + sequence)
    low = 0
    if WINDOWED:
        low = tl.maximum(limit - q_len + first_row // GROUP - window + 1, 0) // KEYS * KEYS
    last_position = tl.minimum(limit - q_len + (first_row + ROWS - 1) // GROUP, limit - 1)
    count = tl.cdiv(last_position + 1 - low, KEYS)
    row = tl.arange(0, STORED)
    lane = tl.arange(0, 8)
    column = first_column + tl.arange(0, COLUMNS)
    m = tl.full((STORED,), NEG_INF, tl.float32)
    lanes = tl.zeros((STORED, 8), tl.float32)
    acc = tl.zeros((STORED, COLUMNS), tl.float32)
    first_slot = tl.program_id(0).to(tl.int64) * slots
    for begin in tl.range(0, count, AHEAD):
        # The loads of AHEAD blocks do not wait for the folds between them.
        for i in tl.static_range(AHEAD):
            inside = begin + i < count
            place = (first_slot + tl.minimum(begin + i, count - 1)) * STORED + row
            next_m = tl.load(block_m + place)
            next_lanes = tl.load(block_lanes + place[:, None] * 8 + lane[None, :])
            next_acc = tl.load(block_acc + place[:, None] * DIM + column[None, :])
            # Beyond the last block: a block that no row sees.
            next_m = tl.where(inside, next_m, NEG_INF)
            m, lanes, acc = _fold(m, lanes, acc, next_m, next_lanes, next_acc, True)
    valid, token, head, position = _rows_of(
        first_row, kv_head, q_len, limit - q_len, STORED, GROUP
    )
    token_row = (tl.load(query_start + sequence) + token).to(tl.int64)
    _write_rows(
        O + first_column, LSE, m, lanes, acc, valid, token_row, head,
        stride_ot, stride_oh, stride_lse, STORED, HEAD_DIM - first_column, COLUMNS,
    )  # fmt: skip


@triton.jit
def attention_delta_kernel(
    dO, O, DELTA, num_rows, stride_dot, stride_doh, stride_ot, stride_oh, HEADS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """delta = tree(do * o) for every query and head."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    dim = tl.arange(0, DIM)
    mask = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    do = tl.load(
        dO + token[:, None] * stride_dot + head[:, None] * stride_doh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    o = tl.load(
        O + token[:, None] * stride_ot + head[:, None] * stride_oh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    product = do.to(tl.float32) * o.to(tl.float32)
    tl.store(DELTA + row, tree_fold(product, ROWS, DIM), mask=row < num_rows)


@triton.jit
def _fold_dq(
    q, do, lse, delta, position, low, high, K, V, k_descriptor, v_descriptor, row0, kv_head, limit,
    window, factor, stride_kt, stride_kh, stride_vt, stride_vh, dq,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, KEYS):
        k = _load_rows(K, k_descriptor, K, start, row0, kv_head, limit, stride_kt, stride_kh, 1,
                       KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        v = _load_rows(V, v_descriptor, V, start, row0, kv_head, limit, stride_vt, stride_vh, 1,
                       KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2(tl.fma(scores, factor, -lse[:, None]))
        if MASKED:
            key = start + tl.arange(0, KEYS)
            p = tl.where(_visible(position[:, None], key[None, :], window), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def attention_dq_kernel(
    dO, Q, K, V, k_descriptor, v_descriptor, LSE, DELTA, dQ, tiles, query_start, query_len,
    window, factor, scale,
    stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dqt, stride_dqh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows: a matrix-step fold over keys upward."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    limit = tl.load(query_len + sequence)
    start_row = tl.load(query_start + sequence)
    valid, token, head, position = _rows_of(first_row, kv_head, limit, 0, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    dim = tl.arange(0, DIM)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        Q + token_row[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    do = tl.load(
        dO + token_row[:, None] * stride_dot + head[:, None] * stride_doh + dim[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    lse = tl.load(LSE + token_row * stride_lse + head, mask=valid, other=0.0) * LOG2E
    delta = tl.load(DELTA + token_row * stride_lse + head, mask=valid, other=0.0)
    first_position = first_row // GROUP
    last_position = tl.minimum((first_row + ROWS - 1) // GROUP, limit - 1)
    high = last_position + 1
    low = 0
    dq = tl.zeros((ROWS, DIM), tl.float32)
    full_high = (first_position + 1) // KEYS * KEYS
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
        edge = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS
        full_low = tl.minimum(tl.maximum(edge, low), tl.maximum(full_high, low))
        dq = _fold_dq(
            q, do, lse, delta, position, low, full_low, K, V, k_descriptor, v_descriptor, start_row,
            kv_head, limit, window, factor, stride_kt, stride_kh, stride_vt, stride_vh, dq,
            KEYS, HEAD_DIM, DIM, SOURCE, True,
        )  # fmt: skip
        low = full_low
        full_high = tl.maximum(full_high, low)
    dq = _fold_dq(
        q, do, lse, delta, position, low, full_high, K, V, k_descriptor, v_descriptor, start_row,
        kv_head, limit, window, factor, stride_kt, stride_kh, stride_vt, stride_vh, dq,
        KEYS, HEAD_DIM, DIM, SOURCE, False,
    )  # fmt: skip
    dq = _fold_dq(
        q, do, lse, delta, position, full_high, high, K, V, k_descriptor, v_descriptor, start_row,
        kv_head, limit, window, factor, stride_kt, stride_kh, stride_vt, stride_vh, dq,
        KEYS, HEAD_DIM, DIM, SOURCE, True,
    )  # fmt: skip
    tl.store(
        dQ + token_row[:, None] * stride_dqt + head[:, None] * stride_dqh + dim[None, :],
        (dq * scale + 0.0).to(dQ.dtype.element_ty), mask=mask,
    )  # fmt: skip


@triton.jit
def attention_dkv_kernel(
    dO, Q, K, V, do_descriptor, q_descriptor, LSE, DELTA, dK, dV, tiles, query_start, query_len,
    window, factor, scale,
    stride_dot, stride_doh, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: a matrix-step fold over the group's heads, then queries."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_key = tl.load(tiles + 2 * tile + 1)
    limit = tl.load(query_len + sequence)
    start_row = tl.load(query_start + sequence)
    key = first_key + tl.arange(0, KEYS)
    row = (start_row + key).to(tl.int64)
    dim = tl.arange(0, DIM)
    mask = (key < limit)[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(
        K + row[:, None] * stride_kt + kv_head * stride_kh + dim[None, :], mask=mask, other=0.0
    )
    v = tl.load(
        V + row[:, None] * stride_vt + kv_head * stride_vh + dim[None, :], mask=mask, other=0.0
    )
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    # One loop over the group's heads and their query tiles; several spill registers.
    low = first_key // QUERIES * QUERIES
    high = limit
    if WINDOWED:
        high = tl.minimum(limit, first_key + KEYS - 1 + window)
    per_head = tl.cdiv(high - low, QUERIES)
    for step in tl.range(0, GROUP * per_head):
        head = kv_head * GROUP + step // per_head
        start = low + step % per_head * QUERIES
        query = start + tl.arange(0, QUERIES)
        inside = query < limit
        token_row = (start_row + query).to(tl.int64)
        q = _load_rows(Q, q_descriptor, Q, start, start_row, head, limit, stride_qt, stride_qh, 1,
                       QUERIES, HEAD_DIM, DIM, SOURCE, SOURCE == 0)  # fmt: skip
        do = _load_rows(dO, do_descriptor, dO, start, start_row, head, limit, stride_dot,
                        stride_doh, 1, QUERIES, HEAD_DIM, DIM, SOURCE, SOURCE == 0)  # fmt: skip
        # A query past the end gets an infinite normalizer, so its probabilities are 0.
        lse = tl.load(LSE + token_row * stride_lse + head, mask=inside, other=float("inf"))
        delta = tl.load(DELTA + token_row * stride_lse + head, mask=inside, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [KEYS, QUERIES]
        p = tl.exp2(tl.fma(scores, factor, -(lse * LOG2E)[None, :]))
        p = tl.where(_visible(query[None, :], key[:, None], window), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    tl.store(
        dK + row[:, None] * stride_dkt + kv_head * stride_dkh + dim[None, :],
        (dk * scale + 0.0).to(dK.dtype.element_ty), mask=mask,
    )  # fmt: skip
    tl.store(
        dV + row[:, None] * stride_dvt + kv_head * stride_dvh + dim[None, :],
        (dv + 0.0).to(dV.dtype.element_ty), mask=mask,
    )  # fmt: skip


NO_WINDOW = 1 << 30
SPLIT_ROWS = 16
"""Rows of a tile up to which its key blocks may be written out one by one."""
AHEAD = 8
"""Blocks that the combining program reads at a time."""


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    *,
    schedule: Schedule | None = None,
    programs_per_tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] and lse [T, H] fp32; rows that no sequence owns are 0 and -inf.

    `schedule` and `programs_per_tile` (over how many programs the key blocks of a tile of few rows
    are spread) are for tests and tuning; any choice gives the same bits.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((rows, heads), float("-inf"), device=q.device)
    most_rows = max(layout.query_lens, default=0) * group
    if most_rows == 0:
        return out, lse
    schedule = schedule or _pick(q, k, v, layout, most_rows)
    tiles = layout.tiles(q.device, group, schedule.rows)
    tables = layout.tables(q.device)
    paged = isinstance(layout, PagedAttention)
    dim = max(triton.next_power_of_2(head_dim), 16)
    keys = key_block(head_dim)
    most_blocks = -(-max(layout.context_lens) // keys)
    grid = len(tiles) * kv_heads
    if programs_per_tile is None:
        programs_per_tile = _programs_per_tile(grid, most_blocks, most_rows, sm_count(q.device))
    shared = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "ROWS": schedule.rows,
        "KEYS": keys,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "WINDOWED": window is not None,
        "enable_fp_fusion": False,
    }
    numbers = (tables.query_start, tables.query_len, tables.context_len)
    reach = NO_WINDOW if window is None else window
    cache = (
        layout.block_size if isinstance(layout, PagedAttention) else 1,
        tables.block_table.shape[1],
    )
    factor = scale * 1.4426950408889634
    operands = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
    )  # fmt: skip
    results = (out.stride(0), out.stride(1), lse.stride(0))
    if schedule.specialized and (paged or not has_tma(q.device) or not attention_hopper.takes(q, k, v)):
        raise ValueError("attention: specialised warps need sm_90, packed 16-bit keys and head_dim 64 or 128.")
    if schedule.specialized:
        attention_hopper.attention_hopper_fwd(
            q, k, v, out, lse, tiles, numbers, window, reach, factor
        )
        return out, lse
    if programs_per_tile == 1:
        described = schedule.descriptors and not paged and _describable(k, v)
        attention_fwd_kernel[(grid,)](
            q, k, v, out, lse, *_sources(described, [keys, 1, dim], k, v), tiles, *numbers,
            tables.block_table, reach, factor, *cache, *operands, *results,
            SOURCE=1 if paged else 2 if described else 0,
            num_warps=schedule.warps, num_stages=schedule.stages, **shared,
        )  # fmt: skip
        return out, lse
    stored = triton.next_power_of_2(min(most_rows, schedule.rows))
    places = grid * most_blocks * stored
    block_m = torch.empty(places, device=q.device)
    block_lanes = torch.empty(places, 8, device=q.device)
    block_acc = torch.empty(places, dim, device=q.device)
    blocks_per_program = -(-most_blocks // programs_per_tile)
    attention_block_kernel[(grid, -(-most_blocks // blocks_per_program))](
        q, k, v, block_m, block_lanes, block_acc, tiles, *numbers, tables.block_table,
        reach, factor, *cache, most_blocks, blocks_per_program, *operands,
        SOURCE=1 if paged else 0, STORED=stored,
        num_warps=schedule.warps, num_stages=schedule.stages, **shared,
    )  # fmt: skip
    columns = min(dim, 32)
    attention_combine_kernel[(grid, dim // columns)](
        out, lse, block_m, block_lanes, block_acc, tiles, *numbers, reach, most_blocks, *results,
        STORED=stored, COLUMNS=columns, AHEAD=AHEAD, num_warps=1 if stored <= 4 else 4, **shared,
    )  # fmt: skip
    return out, lse


def _programs_per_tile(grid: int, most_blocks: int, most_rows: int, processors: int) -> int:
    """Enough programs to occupy every multiprocessor; 1 where the tiles alone do."""
    if most_rows > SPLIT_ROWS or most_blocks < 4:
        return 1
    return max(1, min(most_blocks, 2 * processors // grid))


def attention_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PackedSequences,
    scale: float,
    window: int | None,
    *,
    query_schedule: Schedule | None = None,
    key_schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtype of q; rows that no sequence owns are 0."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if max(layout.query_lens, default=0) == 0:
        return dq, dk, dv
    if do.stride(-1) != 1:
        do = do.contiguous()
    dim = max(triton.next_power_of_2(head_dim), 16)
    delta = torch.empty_like(lse)
    attention_delta_kernel[(triton.cdiv(rows * heads, 32),)](
        do, out, delta, rows * heads, do.stride(0), do.stride(1), out.stride(0), out.stride(1),
        HEADS=heads, ROWS=32, HEAD_DIM=head_dim, DIM=dim, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    by_query = query_schedule or _pick_backward(BACKWARD_QUERIES, q, dim)
    by_key = key_schedule or _pick_backward(BACKWARD_KEYS, q, dim)
    tables = layout.tables(q.device)
    reach = NO_WINDOW if window is None else window
    factor = scale * 1.4426950408889634
    operands = (
        do.stride(0), do.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1),
    )  # fmt: skip
    shared = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "WINDOWED": window is not None,
        "enable_fp_fusion": False,
    }
    tiles = layout.tiles(q.device, group, by_query.rows)
    described = by_query.descriptors and _describable(k, v)
    box = [by_query.keys, 1, dim]
    attention_dq_kernel[(len(tiles) * kv_heads,)](
        do, q, k, v, *_sources(described, box, k, v), lse, delta, dq, tiles, tables.query_start, tables.query_len,
        reach, factor, scale, *operands, dq.stride(0), dq.stride(1), lse.stride(0),
        ROWS=by_query.rows, KEYS=by_query.keys, num_warps=by_query.warps,
        num_stages=by_query.stages, SOURCE=2 if described else 0, **shared,
    )  # fmt: skip
    key_tiles = layout.key_tiles(q.device, by_key.keys)
    described = by_key.descriptors and _describable(do, q)
    box = [by_key.rows, 1, dim]
    attention_dkv_kernel[(len(key_tiles) * kv_heads,)](
        do, q, k, v, *_sources(described, box, do, q), lse, delta, dk, dv, key_tiles, tables.query_start, tables.query_len,
        reach, factor, scale, *operands, dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
        lse.stride(0), QUERIES=by_key.rows, KEYS=by_key.keys, num_warps=by_key.warps,
        num_stages=by_key.stages, SOURCE=2 if described else 0, **shared,
    )  # fmt: skip
    return dq, dk, dv


def _pick(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, most_rows: int) -> Schedule:
    half = q.dtype.itemsize == 2 and q.shape[2] <= 128
    if most_rows <= 64:
        return DECODE[0] if half else DECODE[-1]
    if not half:
        return PREFILL[5]
    if not has_tma(q.device):
        return PREFILL[4]
    packed = isinstance(layout, PackedSequences)
    return PREFILL[0] if packed and attention_hopper.takes(q, k, v) else PREFILL[2]


def _pick_backward(table: tuple[Schedule, ...], q: Tensor, dim: int) -> Schedule:
    small = q.dtype == torch.float32 or dim > 128
    return table[-1] if small else table[0]


def _sources(described: bool, box: list[int], *tensors: Tensor) -> list[Tensor | TensorDescriptor]:
    """Each [T, heads, D] tensor behind a descriptor of `box`, or as it is."""
    if not described:
        return list(tensors)
    return [TensorDescriptor(x, list(x.shape), list(x.stride()), box) for x in tensors]


def _describable(*tensors: Tensor) -> bool:
    """Whether a tensor descriptor can address the tensors: sm_90, 16-byte aligned rows."""
    return all(
        has_tma(x.device)
        and x.data_ptr() % 16 == 0
        and x.stride(2) == 1
        and all(x.stride(i) * x.itemsize % 16 == 0 for i in (0, 1))
        for x in tensors
    )
