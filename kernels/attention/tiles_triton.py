"""What attention kernels share: rows of a tile, how they are read and written, what they see."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_consistency.kernels.reduction.tree_fold_triton import tree_fold

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def rows_of(first_row, pid_head, query_len, past, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(valid, token in the sequence, head, position) of a tile's rows, each [ROWS]."""
    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP
    return row < query_len * GROUP, token, pid_head * GROUP + row % GROUP, past + token


@triton.jit
def load_rows(
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
def visible(query, key, window):
    """Whether a query sees a key, both broadcast against each other."""
    distance = query - key
    return (distance >= 0) & (distance < window)


@triton.jit
def finite(m, MASKED: tl.constexpr):
    """m, or 0 for a row that has seen no key, from which -inf can be subtracted."""
    if MASKED:
        m = tl.where(m == NEG_INF, 0.0, m)
    return m


@triton.jit
def write_rows(
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
