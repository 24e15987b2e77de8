"""What the backward pass in five products reads of each query beside q and do, tile by tile."""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.reduction.tree_fold_triton import LOG2E, tree_fold


@triton.jit(do_not_specialize=["tiles", "query_start", "query_len", "num_tiles"])
def attention_statistics_kernel(
    dO, OUT, LSE, STATISTICS, counters, tiles, query_start, query_len, num_tiles,
    stride_dot, stride_doh, stride_ot, stride_oh, stride_lse,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Of one tile of queries and one head: lse in log2 units and delta = tree(do * o), in one row
    of STATISTICS [heads * tiles, 2, ROWS]; its counter becomes 0."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    position = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    inside = position < tl.load(query_len + sequence)
    row = (tl.load(query_start + sequence) + position).to(tl.int64)
    dim = tl.arange(0, DIM)
    do = tl.load(
        dO + row[:, None] * stride_dot + head * stride_doh + dim[None, :],
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    o = tl.load(
        OUT + row[:, None] * stride_ot + head * stride_oh + dim[None, :],
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    # A query past the end gets an infinite normalizer, so its probabilities are 0.
    lse = tl.load(LSE + row * stride_lse + head, mask=inside, other=float("inf"))
    place = head * num_tiles + tile
    to = STATISTICS + place.to(tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(to, lse * LOG2E)
    tl.store(to + ROWS, tree_fold(do.to(tl.float32) * o.to(tl.float32), ROWS, DIM))
    tl.store(counters + place, 0)


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
        len(tiles), do.stride(0), do.stride(1), out.stride(0), out.stride(1), lse.stride(0),
        ROWS=rows, DIM=head_dim, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return statistics, counters
