"""Two numbers per query and head that the backward pass needs: lse, the log-sum-exp of the scores,
and delta = tree(do * o), which is subtracted from the gradients of the probabilities.

`backward_triton` reads delta row by row and lse as the forward pass left it; `hopper/backward.py`
reads both from one row per tile.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import PER_CALL, padded
from rl_consistency.kernels.attention.tiles_triton import addresses
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.reduction.tree_fold_triton import LOG2E, tree_fold


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def attention_delta_kernel(
    dO, OUT, DELTA, num_rows, stride_dot, stride_doh, stride_ot, stride_oh, HEADS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """DELTA [num_rows = T * HEADS], ROWS of them per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    head = head[:, None]
    mask = (row < num_rows)[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    do = tl.load(addresses(dO, token, head, stride_dot, stride_doh, DIM), mask=mask, other=0.0)
    o = tl.load(addresses(OUT, token, head, stride_ot, stride_oh, DIM), mask=mask, other=0.0)
    product = do.to(tl.float32) * o.to(tl.float32)
    tl.store(DELTA + row, tree_fold(product, ROWS, DIM), mask=row < num_rows)


@remembered
@triton.jit(do_not_specialize=PER_CALL)
def attention_statistics_kernel(
    dO, OUT, LSE, STATISTICS, counters, tiles, query_start, query_len, num_tiles, stride_dot,
    stride_doh, stride_ot, stride_oh, stride_lse, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Write one tile's row of STATISTICS [heads * tiles, 2, ROWS], lse in log2 units and delta, and
    set its counter to 0. Grid: (tiles, heads)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    position = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    inside = position < tl.load(query_len + sequence)
    row = (tl.load(query_start + sequence) + position).to(tl.int64)
    mask = inside[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    do = tl.load(addresses(dO, row, head, stride_dot, stride_doh, DIM), mask=mask, other=0.0)
    o = tl.load(addresses(OUT, row, head, stride_ot, stride_oh, DIM), mask=mask, other=0.0)
    # A query past the end gets an infinite lse, so its probabilities are 0.
    lse = tl.load(LSE + row * stride_lse + head, mask=inside, other=float("inf"))
    place = head * num_tiles + tile
    to = STATISTICS + place.to(tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(to, lse * LOG2E)
    tl.store(to + ROWS, tree_fold(do.to(tl.float32) * o.to(tl.float32), ROWS, DIM))
    tl.store(counters + place, 0)


def delta_of(do: Tensor, out: Tensor, dim: int) -> Tensor:
    """delta [T, H] fp32; `dim` is D rounded up to a power of two."""
    tokens, heads, head_dim = do.shape
    delta = torch.empty(tokens, heads, dtype=torch.float32, device=do.device)
    attention_delta_kernel[(cdiv(tokens * heads, 32),)](
        do, out, delta, tokens * heads, *do.stride()[:2], *out.stride()[:2],
        HEADS=heads, ROWS=32, HEAD_DIM=head_dim, DIM=dim, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return delta


def statistics_of(
    do: Tensor, out: Tensor, lse: Tensor, layout: PackedSequences, rows: int
) -> tuple[Tensor, Tensor]:
    """(STATISTICS [heads * tiles, 2, rows] fp32, counters [heads * tiles] int32, all 0)."""
    heads, head_dim = do.shape[1:]
    tables = layout.tables(do.device)
    tiles, _ = layout.query_tiles(do.device, rows)
    statistics = torch.empty(heads * len(tiles), 2, rows, dtype=torch.float32, device=do.device)
    counters = torch.empty(heads * len(tiles), dtype=torch.int32, device=do.device)
    attention_statistics_kernel[(len(tiles), heads)](
        do, out, lse, statistics, counters, tiles, tables.query_start, tables.query_len,
        len(tiles), *do.stride()[:2], *out.stride()[:2], lse.stride(0),
        ROWS=rows, HEAD_DIM=head_dim, DIM=padded(head_dim), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return statistics, counters
