"""Keys and values of a paged cache on their way to the programs of `decode` and `decode_prefix`."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rl_consistency.kernels.attention.hopper.head_parts import parts_of
from rl_consistency.kernels.attention.hopper.tiles import WARPS
from rl_consistency.kernels.core.prefetch import LINE, prefetch_lines


@gluon.jit
def entries_of(table, start, limit, BLOCK: gl.constexpr, KEYS: gl.constexpr):
    """Physical blocks [KEYS] of the keys from `start`, one a thread."""
    key = start + gl.arange(0, KEYS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.load(table + key // BLOCK, mask=key < limit, other=0)


@gluon.constexpr_function
def keys_layout(keys, columns):
    """Copies of 16 bytes: a thread's rows mostly lie in one cache block, their copies in distinct
    banks."""
    each = min(8, keys * columns // 1024)
    return gl.BlockedLayout([each, 8], [256 // columns, columns // 8], [WARPS.value, 1], [1, 0])


@gluon.jit
def _copy_part(
    buffer, base, entries, start, limit, stride_row, column, BLOCK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Start copying keys or values, from `column` on, into a buffer [KEYS, columns]."""
    KEYS: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = keys_layout(KEYS, COLUMNS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    key = start + gl.arange(0, KEYS, layout=rows)
    dim = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    row = gl.convert_layout(entries, rows).to(gl.int64) * BLOCK + key % BLOCK
    pointer = base + gl.expand_dims(row * stride_row, 1) + gl.expand_dims(dim, 0)
    inside = gl.expand_dims(key < limit, 1) & gl.expand_dims(dim < HEAD_DIM, 0)
    async_copy.async_copy_global_to_shared(buffer, pointer, mask=inside)


@gluon.jit
def prefetch_keys(base, entries, start, stride_row, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Ask for the keys or values from `start` in the L2 cache.

    `entries` [KEYS] say where they lie. A key past the sequence's end is asked for in block 0.
    """
    ELEMENTS: gl.constexpr = LINE * 8 // base.dtype.element_ty.primitive_bitwidth
    key = start + gl.arange(0, entries.shape[0], layout=entries.type.layout)
    row = entries.to(gl.int64) * BLOCK + key % BLOCK
    for column in gl.static_range(0, HEAD_DIM, ELEMENTS):
        prefetch_lines(base + row * stride_row + column)


@gluon.jit
def copy_keys(
    bufs, base, entries, start, end, limit, stride_row, BLOCK: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Start copying keys or values from `start`, zeros past `limit` and HEAD_DIM, as one group."""
    PARTS: gl.constexpr = parts_of(DIM)
    if start < end:
        for i in gl.static_range(len(PARTS)):
            _copy_part(
                bufs[i], base, entries, start, limit, stride_row, PARTS[i][0], BLOCK, HEAD_DIM
            )
    async_copy.commit_group()
