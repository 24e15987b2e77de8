"""The tiles of products of experts: which pairs and columns a program has, and what it loads.

An expert's pairs are cut into tall tiles; pairs left for a tile that fit a short one take that.
Where a schedule has one tile, it is both.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_tile(
    tile, first_ptr, E, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The expert of a tile of pairs, its first pair, and where the expert's pairs end.

    Each expert's pairs are cut into tiles of TALL_M of their own. Experts of more than BLOCK_M
    pairs come first, since their tiles take longest. Past the last tile the expert is E or more.
    """
    other = tl.arange(0, BLOCK_E)
    begin = tl.load(first_ptr + other, mask=other < E, other=0)
    end = tl.load(first_ptr + other + 1, mask=other < E, other=0)
    tiles = tl.cdiv(end - begin, TALL_M)
    if TALL_M > BLOCK_M:
        tall = (end - begin > BLOCK_M).to(tl.int32)
        ahead = tl.sum(tiles * tall, axis=0)
        tiles = tl.where(tall == (tile < ahead).to(tl.int32), tiles, 0)
        tile -= tl.where(tile < ahead, 0, ahead)
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((upto <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(other < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(other == expert, begin, 0), axis=0)
    stop = tl.sum(tl.where(other == expert, end, 0), axis=0)
    return expert, own + (tile - before) * TALL_M, stop


@triton.jit
def takes_short(start, stop, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr):
    """Whether the pairs left for a tile fit a short one; where all tiles are alike, they are it."""
    if TALL_M == BLOCK_M:
        return start < stop
    return stop - start <= BLOCK_M


@triton.jit
def tile_in_grid(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The tile of pairs and the tile of columns of a program."""
    group = program // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return group * GROUP_M + within % height, within // height


@triton.jit
def operand_rows(place, stop, pairs_ptr, TOP_K: tl.constexpr, BY_ROW: tl.constexpr):
    """[BLOCK_M] int64, where the operand's rows of some pairs lie."""
    if BY_ROW:
        return tl.load(pairs_ptr + place, mask=place < stop, other=0).to(tl.int64) // TOP_K
    return place.to(tl.int64)


@triton.jit
def rows_of(a_ptr, a_desc, row, present, first_row, k, K, stride_a, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of the operand from k on, by pointers, or by descriptor where there is
    one, which also reads rows of other experts behind the last one."""
    if a_desc is None:
        steps = k + tl.arange(0, BLOCK_K)
        at = a_ptr + row[:, None] * stride_a + steps[None, :]
        a = tl.load(at, mask=present & (steps < K)[None, :], other=0.0)
    else:
        a = a_desc.load([first_row, k])
    return a


@triton.jit
def weights_of(
    b_ptr, b_desc, expert, column, k, N, K, COLUMNS, stride_be, stride_bk, stride_bn,
    NT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of an expert's weights from (k, column) on, of which the expert has
    COLUMNS; past N, a descriptor reads other weights."""
    if b_desc is None:
        steps = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        columns = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
        at = b_ptr + expert.to(tl.int64) * stride_be
        at += steps[:, None] * stride_bk + columns[None, :] * stride_bn
        b = tl.load(at, mask=(steps < K)[:, None] & (columns < N)[None, :], other=0.0)
    elif NT:
        b = b_desc.load([expert * COLUMNS + column, k]).T
    else:
        b = b_desc.load([expert * K + k, column])
    return b
