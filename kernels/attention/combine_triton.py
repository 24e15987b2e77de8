"""The fold of key blocks that were written out one by one: a kernel of its own, in their order.

Programs are spread over the columns of a head; every column's fold is the same chain of fused
multiply-adds, upward over blocks.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from rl_consistency.kernels.attention.tiles_triton import NEG_INF, finite, rows_of, write_rows

AHEAD = 32
"""Blocks that the combining program reads at a time."""
COMBINED_COLUMNS = 8
"""Of a head, that one combining program folds."""


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


@triton.jit(
    do_not_specialize=["tiles", "query_start", "query_len", "context_len", "window", "slots"]
)
def attention_combine_kernel(
    OUT, LSE, block_m, block_lanes, block_acc, left, right, tiles, query_start, query_len,
    context_len, window, slots, stride_ot, stride_oh, stride_lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STORED: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    WINDOWED: tl.constexpr, SCAN: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
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
    if OVERLAP:
        # What is read up to here is older than the kernel ahead.
        gdc_wait()
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
    token_row = (tl.load(query_start + sequence) + token).to(tl.int64)
    write_rows(
        OUT + first_column, LSE, m, lanes, acc, valid, token_row, head,
        stride_ot, stride_oh, stride_lse, STORED, HEAD_DIM - first_column, COLUMNS,
    )  # fmt: skip


def attention_combine(
    out: Tensor,
    lse: Tensor,
    written: tuple[Tensor, Tensor, Tensor],
    tiles: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    reach: int,
    most_blocks: int,
    stored: int,
    overlap: bool,
    shared: dict[str, Any],
) -> None:
    """Fill `out` and `lse` from blocks in memory.

    Args:
        written: block_m [places], block_lanes [places, 8] and block_acc [places, D], fp32.
        numbers: first rows, queries and contexts of the sequences.
        most_blocks: of any tile.
        stored: rows of a tile that were written.
        overlap: whether the launch overlaps the end of the kernel ahead.
        shared: what the kernel has in common with the one that wrote.
    """
    block_m, _, block_acc = written
    left, right = torch.empty(2, len(block_m), dtype=torch.float32, device=out.device)
    dim = block_acc.shape[1]
    columns = min(dim, COMBINED_COLUMNS)
    attention_combine_kernel[(len(tiles) * shared["KV_HEADS"], dim // columns)](
        out, lse, *written, left, right, tiles, *numbers, reach, most_blocks,
        out.stride(0), out.stride(1), lse.stride(0), STORED=stored, COLUMNS=columns, AHEAD=AHEAD,
        SCAN=max(16, triton.next_power_of_2(most_blocks)), OVERLAP=overlap,
        num_warps=max(1, stored // 4), launch_pdl=overlap, **shared,
    )  # fmt: skip
