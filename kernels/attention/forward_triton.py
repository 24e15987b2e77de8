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

from rl_consistency.kernels.attention.combine_triton import attention_combine
from rl_consistency.kernels.attention.hopper import decode as attention_decode
from rl_consistency.kernels.attention.hopper import forward as attention_hopper
from rl_consistency.kernels.attention.layout import AttentionLayout, PagedAttention
from rl_consistency.kernels.attention.schedules import (
    LOG2E,
    NO_RING,
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
    slices_for,
    sources,
)
from rl_consistency.kernels.attention.tiles_triton import (
    NEG_INF,
    finite,
    load_rows,
    rows_of,
    visible,
    write_rows,
)
from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.reduction.tree_fold_triton import fold_to_lanes


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
    p = tl.exp2(tl.fma(scores, factor, -finite(m, MASKED)[:, None]))
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m, fold_to_lanes(p, ROWS, KEYS), acc


@triton.jit
def _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED: tl.constexpr):
    """Fold one more block into the running (m, lanes, acc)."""
    new_m = tl.maximum(m, block_m)
    shift = finite(new_m, MASKED)
    left = tl.exp2(m - shift)[:, None]
    right = tl.exp2(block_m - shift)[:, None]
    lanes = tl.fma(block_lanes, right, lanes * left)
    acc = tl.fma(block_acc, right, acc * left)
    return new_m, lanes, acc


@triton.jit
def _fold_keys(
    m, lanes, acc, q, position, low, high, window, factor,
    K, V, k_descriptor, v_descriptor, table, row0, head, limit,
    stride_kt, stride_kh, stride_vt, stride_vh, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the blocks of keys low .. high, low on a block."""
    for start in tl.range(low, high, KEYS):
        k = load_rows(K, k_descriptor, table, start, row0, head, limit, stride_kt, stride_kh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        v = load_rows(V, v_descriptor, table, start, row0, head, limit, stride_vt, stride_vh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, MASKED)  # fmt: skip
        block_m, block_lanes, block_acc = _block(
            q, k, v, position, start, window, factor, ROWS, KEYS, DIM, MASKED
        )
        m, lanes, acc = _fold(m, lanes, acc, block_m, block_lanes, block_acc, MASKED)
    return m, lanes, acc


@triton.jit(
    do_not_specialize=[
        "tiles",
        "query_start",
        "query_len",
        "context_len",
        "tables",
        "window",
        "num_blocks",
    ]
)
def attention_fwd_kernel(
    Q, K, V, OUT, LSE, k_descriptor, v_descriptor,
    tiles, query_start, query_len, context_len, tables,
    window, factor, num_blocks,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
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
            stride_kt, stride_kh, stride_vt, stride_vh, BLOCK,
            ROWS, KEYS, HEAD_DIM, DIM, SOURCE, True,
        )  # fmt: skip
    m, lanes, acc = _fold_keys(
        m, lanes, acc, q, position, full_low, full_high, window, factor,
        K, V, k_descriptor, v_descriptor, table, start_row, kv_head, limit,
        stride_kt, stride_kh, stride_vt, stride_vh, BLOCK,
        ROWS, KEYS, HEAD_DIM, DIM, SOURCE, False,
    )  # fmt: skip
    m, lanes, acc = _fold_keys(
        m, lanes, acc, q, position, full_high, last_position + 1, window, factor,
        K, V, k_descriptor, v_descriptor, table, start_row, kv_head, limit,
        stride_kt, stride_kh, stride_vt, stride_vh, BLOCK,
        ROWS, KEYS, HEAD_DIM, DIM, SOURCE, True,
    )  # fmt: skip
    write_rows(
        OUT, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
        ROWS, HEAD_DIM, DIM,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "tiles",
        "query_start",
        "query_len",
        "context_len",
        "tables",
        "window",
        "num_blocks",
        "slots",
    ]
)
def attention_block_kernel(
    Q, K, V, block_m, block_lanes, block_acc,
    tiles, query_start, query_len, context_len, tables,
    window, factor, num_blocks, slots,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STORED: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SOURCE: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK: tl.constexpr,
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
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        v = load_rows(V, V, table, start, start_row, kv_head, limit, stride_vt, stride_vh,
                       BLOCK, KEYS, HEAD_DIM, DIM, SOURCE, True)  # fmt: skip
        m, lanes, acc = _block(q, k, v, position, start, window, factor, ROWS, KEYS, DIM, True)
        slot = tl.program_id(0).to(tl.int64) * slots + (start - low) // KEYS
        place = slot * STORED + row
        tl.store(block_m + place, m, mask=stored)
        tl.store(block_lanes + place[:, None] * 8 + lane[None, :], lanes, mask=stored[:, None])
        tl.store(block_acc + place[:, None] * DIM + dim[None, :], acc, mask=stored[:, None])


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
    dim = max(1 << (head_dim - 1).bit_length(), 16)
    keys = key_block(head_dim)
    most_blocks = -(-max(layout.context_lens) // keys)
    grid = tiles.shape[0] * kv_heads
    stored = 1 << (min(most_rows, schedule.rows) - 1).bit_length()
    places = grid * most_blocks * stored
    device_programs = schedule.resident * sm_count(q.device)
    if programs_per_tile is None:
        programs_per_tile = programs_for(grid, most_blocks, most_rows, dim, device_programs)
    shared = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "ROWS": schedule.rows,
        "KEYS": keys,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "WINDOWED": window is not None,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
    }
    numbers = (tables.query_start, tables.query_len, tables.context_len)
    reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
    block_size = layout.block_size if isinstance(layout, PagedAttention) else 1
    factor = scale * LOG2E
    operands = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
    )  # fmt: skip
    results = (out.stride(0), out.stride(1), lse.stride(0))
    if not admits(schedule, layout, q, k, v):
        raise ValueError(NO_RING if schedule.ring else UNSPECIALIZED)
    if schedule.specialized:
        attention_hopper.attention_hopper_fwd(
            q, k, v, out, lse, tiles, numbers, window, reach, factor, max(layout.context_lens)
        )
        return out, lse
    written = None
    if programs_per_tile > 1:
        written = (
            torch.empty(places, dtype=torch.float32, device=q.device),
            torch.empty(places, 8, dtype=torch.float32, device=q.device),
            torch.empty(places, dim, dtype=torch.float32, device=q.device),
        )
    fused = written is not None and schedule.fused
    if schedule.ring:
        spread = fused and schedule.spread
        attention_decode.attention_decode_fwd(
            q, k, v, out, lse, written, layout.tickets(q.device, grid) if fused else None, tiles,
            numbers, tables.block_table, window=window, reach=reach, factor=factor,
            block_size=block_size, programs=programs_per_tile, slots=most_blocks, stored=stored,
            ring=schedule.ring, resident=schedule.resident, overlap=schedule.overlap,
            slices=slices_for(grid, programs_per_tile, dim, device_programs) if spread else 1,
        )  # fmt: skip
    elif written is None:
        described = schedule.descriptors and not paged and describable(k, v)
        attention_fwd_kernel[(grid,)](
            q, k, v, out, lse, *sources(described, [keys, 1, dim], k, v), tiles, *numbers,
            tables.block_table, reach, factor, tables.block_table.shape[1], *operands, *results,
            SOURCE=1 if paged else 2 if described else 0, BLOCK=block_size,
            num_warps=schedule.warps, **shared,
        )  # fmt: skip
    else:
        attention_block_kernel[(grid, programs_per_tile)](
            q, k, v, *written, tiles, *numbers, tables.block_table, reach, factor,
            tables.block_table.shape[1], most_blocks, *operands,
            SOURCE=1 if paged else 0, STORED=stored, BLOCK=block_size,
            num_warps=schedule.warps, **shared,
        )  # fmt: skip
    if written is not None and not fused:
        attention_combine(
            out, lse, written, tiles, numbers, reach, most_blocks, stored, schedule.overlap, shared
        )
    return out, lse
