"""Triton schedules of the forward attention order: prefill, chunked prefill and paged decode.

A program owns a tile of rows of one KV head: row r of a sequence is query r // group, head
r % group of the group, so the heads that share keys share their loads. Tiles of any height, keys
read through a descriptor, by pointer or from a paged cache, blocks of a long context one after
another or spread over programs: all give the same bits, because every sum is either a chain of
matrix steps or an explicit tree.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels import attention_hopper
from rl_consistency.kernels.attention_layout import AttentionLayout, PagedAttention
from rl_consistency.kernels.attention_schedules import (
    LOG2E,
    NO_WINDOW,
    UNSPECIALIZED,
    Schedule,
    admits,
    dense,
    describable,
    key_block,
    lse_dtype,
    pick_forward,
    programs_for,
    sources,
)
from rl_consistency.kernels.attention_tiles import load_rows, rows_of, visible
from rl_consistency.kernels.cuda_device import sm_count
from rl_consistency.kernels.tree_fold import fold_to_lanes, tree_fold

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _block(
    q, k, v, position, start, window, factor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block on its own: m [ROWS] in log2 units, lanes [ROWS, 8], acc [ROWS, DIM]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
    if MASKED:
        key = start + tl.arange(0, KEYS)
        scores = tl.where(visible(position[:, None], key[None, :], window), scores, NEG_INF)
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
        k = load_rows(K, k_descriptor, table, start, row0, head, limit, stride_kt, stride_kh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        v = load_rows(V, v_descriptor, table, start, row0, head, limit, stride_vt, stride_vh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        block_m, block_lanes, block_acc = _block(
            q, k, v, position, start, window, factor, ROWS, KEYS, DIM, MASKED
        )
        m, lanes, acc = _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED)
    return m, lanes, acc


@triton.jit
def _write_rows(
    OUT, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
    ROWS: tl.constexpr, HEAD_DIM, DIM: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, DIM)
    length = tree_fold(lanes, ROWS, 8)
    seen = length > 0
    out = acc * tl.div_rn(1.0, tl.where(seen, length, 1.0))[:, None] + 0.0
    pointer = OUT + token_row[:, None] * stride_ot + head[:, None] * stride_oh + dim[None, :]
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointer, out.to(OUT.dtype.element_ty), mask=mask)
    if LSE.dtype.element_ty == tl.float64:
        m, length = m.to(tl.float64), length.to(tl.float64)
    lse = tl.where(seen, (m + tl.log2(length)) * LN2, NEG_INF)
    tl.store(LSE + token_row * stride_lse + head, lse, mask=valid)


@triton.jit
def attention_fwd_kernel(
    Q, K, V, OUT, LSE, k_descriptor, v_descriptor,
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
    valid, token, head, position = rows_of(first_row, kv_head, q_len, limit - q_len, ROWS, GROUP)
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
    # Blocks that every row sees whole need no mask; a few rows are masked for nothing.
    full_high = tl.maximum((first_position + 1) // KEYS * KEYS, low)
    if ROWS <= 16:
        full_high = low
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
        OUT, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
        ROWS, HEAD_DIM, DIM,
    )  # fmt: skip


@triton.jit
def attention_block_kernel(
    Q, K, V, block_m, block_lanes, block_acc,
    tiles, query_start, query_len, context_len, tables,
    window, factor, block_size, num_blocks, slots,
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
    valid, token, head, position = rows_of(first_row, kv_head, q_len, limit - q_len, ROWS, GROUP)
    token_row = (start_row + token).to(tl.int64)
    dim = tl.arange(0, DIM)
    pointer = Q + token_row[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :]
    q = tl.load(pointer, mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    low = 0
    if WINDOWED:
        low = tl.maximum(limit - q_len + first_row // GROUP - window + 1, 0) // KEYS * KEYS
    last_position = tl.minimum(limit - q_len + (first_row + ROWS - 1) // GROUP, limit - 1)
    # A captured launch has one grid for all lengths: the tile's own blocks are shared out here.
    share = tl.cdiv(tl.cdiv(last_position + 1 - low, KEYS), tl.num_programs(1)) * KEYS
    begin = low + tl.program_id(1) * share
    end = tl.minimum(begin + share, last_position + 1)
    table = tables + sequence.to(tl.int64) * num_blocks
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, 8)
    stored = row < STORED
    for start in tl.range(begin, end, KEYS):
        k = load_rows(K, K, table, start, start_row, kv_head, limit, stride_kt, stride_kh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        v = load_rows(V, V, table, start, start_row, kv_head, limit, stride_vt, stride_vh,
                       block_size, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        m, lanes, acc = _block(q, k, v, position, start, window, factor, ROWS, KEYS, DIM, True)
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
    """Fold the next AHEAD blocks, or the first `count` of them, with factors that are known.

    Nothing here depends on a loop's counter: all loads are issued at once, their offsets constants.
    """
    for i in tl.static_range(AHEAD):
        if MASKED:
            # Beyond the last block the fold keeps what it has.
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


@triton.jit
def attention_combine_kernel(
    OUT, LSE, block_m, block_lanes, block_acc, left, right, tiles, query_start, query_len,
    context_len, window, slots, stride_ot, stride_oh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STORED: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    WINDOWED: tl.constexpr, SCAN: tl.constexpr, AHEAD: tl.constexpr,
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
    first_slot = tl.program_id(0).to(tl.int64) * slots
    # A running maximum is exact in any order, so the factors of all folds are made at once; the
    # chain over blocks is then one multiplication and one fused multiply-add.
    block = tl.arange(0, SCAN)
    cell = (first_slot + block)[None, :] * STORED + row[:, None]  # [STORED, SCAN]
    known = (block < count)[None, :]
    maxima = tl.load(block_m + cell, mask=known, other=NEG_INF)
    after_first = known & (block > 0)[None, :]
    earlier = tl.load(block_m + cell - STORED, mask=after_first, other=NEG_INF)
    before = tl.associative_scan(earlier, 1, _larger)
    shift = _finite(tl.maximum(before, maxima), True)
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
    token_row = (tl.load(query_start + sequence) + token).to(tl.int64)
    _write_rows(
        OUT + first_column, LSE, m, lanes, acc, valid, token_row, head,
        stride_ot, stride_oh, stride_lse, STORED, HEAD_DIM - first_column, COLUMNS,
    )  # fmt: skip


SPLIT_BYTES = 256 << 20
"""The most memory that blocks written out one by one may take; beyond it tiles are not split."""
AHEAD = 32
"""Blocks that the combining program reads at a time."""
COMBINED_COLUMNS = 8
"""Of a head, that one combining program folds."""


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
    """o [T, H, D] and lse [T, H] in `lse_dtype`; rows that no sequence owns are 0 and -inf.

    `schedule` and `programs_per_tile` (over how many programs the key blocks of a tile of few rows
    are spread) are for tests and tuning; any choice gives the same bits.
    """
    q, k, v = (dense(x) for x in (q, k, v))
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=lse_dtype(q.dtype), device=q.device)
    if not layout.owns(rows):
        out.zero_()
        lse.fill_(float("-inf"))
    most_rows = max(layout.query_lens, default=0) * group
    if most_rows == 0:
        return out, lse
    schedule = schedule or pick_forward(q, k, v, layout, most_rows)
    tiles = layout.tiles(q.device, group, schedule.rows)
    tables = layout.tables(q.device)
    paged = isinstance(layout, PagedAttention)
    dim = max(triton.next_power_of_2(head_dim), 16)
    keys = key_block(head_dim)
    most_blocks = -(-max(layout.context_lens) // keys)
    grid = len(tiles) * kv_heads
    stored = triton.next_power_of_2(min(most_rows, schedule.rows))
    places = grid * most_blocks * stored
    if programs_per_tile is None:
        fits = places * (dim + 11) * 4 <= SPLIT_BYTES
        processors = sm_count(q.device)
        programs_per_tile = programs_for(grid, most_blocks, most_rows, processors) if fits else 1
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
    reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
    cache = (
        layout.block_size if isinstance(layout, PagedAttention) else 1,
        tables.block_table.shape[1],
    )
    factor = scale * LOG2E
    operands = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
    )  # fmt: skip
    results = (out.stride(0), out.stride(1), lse.stride(0))
    if not admits(schedule, layout, q, k, v):
        raise ValueError(UNSPECIALIZED)
    if schedule.specialized:
        attention_hopper.attention_hopper_fwd(
            q, k, v, out, lse, tiles, numbers, window, reach, factor, max(layout.context_lens)
        )
        return out, lse
    if programs_per_tile == 1:
        described = schedule.descriptors and not paged and describable(k, v)
        attention_fwd_kernel[(grid,)](
            q, k, v, out, lse, *sources(described, [keys, 1, dim], k, v), tiles, *numbers,
            tables.block_table, reach, factor, *cache, *operands, *results,
            SOURCE=1 if paged else 2 if described else 0,
            num_warps=schedule.warps, num_stages=schedule.stages, **shared,
        )  # fmt: skip
        return out, lse
    block_m, left, right = torch.empty(3, places, device=q.device)
    block_lanes = torch.empty(places, 8, device=q.device)
    block_acc = torch.empty(places, dim, device=q.device)
    attention_block_kernel[(grid, programs_per_tile)](
        q, k, v, block_m, block_lanes, block_acc, tiles, *numbers, tables.block_table,
        reach, factor, *cache, most_blocks, *operands,
        SOURCE=1 if paged else 0, STORED=stored,
        num_warps=schedule.warps, num_stages=schedule.stages, **shared,
    )  # fmt: skip
    columns = min(dim, COMBINED_COLUMNS)
    attention_combine_kernel[(grid, dim // columns)](
        out, lse, block_m, block_lanes, block_acc, left, right, tiles, *numbers, reach,
        most_blocks, *results, STORED=stored, COLUMNS=columns, AHEAD=AHEAD,
        SCAN=max(16, triton.next_power_of_2(most_blocks)), num_warps=max(1, stored // 4),
        **shared,
    )  # fmt: skip
    return out, lse
