"""What the attention kernels share: which rows a tile has, how they are read, what they see."""

from __future__ import annotations

import triton
import triton.language as tl


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
