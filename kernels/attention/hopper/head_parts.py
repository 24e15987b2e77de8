"""The columns of a head as the sm_90 kernels hold them: in parts, since no buffer has 80 or 96.

What has DIM columns is a tuple of what has the columns of one part. Scores are one chain of matrix
steps over all parts; other results of a product have columns of their own in each part.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def parts_of(dim):
    """(first column, columns) of each part."""
    return ((0, 64), (64, dim - 64)) if 64 < dim < 128 else ((0, dim),)


@gluon.jit
def buffers(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """COUNT buffers [ROWS, DIM] in shared memory."""
    PARTS: gl.constexpr = parts_of(DIM)
    made = ()
    for i in gl.static_range(len(PARTS)):
        made = made + (
            gl.allocate_shared_memory(
                dtype, [COUNT, ROWS, PARTS[i][1]],
                gl.NVMMASharedLayout.get_default_for([ROWS, PARTS[i][1]], dtype),
            ),
        )  # fmt: skip
    return made


@gluon.constexpr_function
def rows_layout(columns):
    """Rows of so many 16-bit columns in shared memory: 16 bytes of eight rows in distinct banks."""
    pieces = min(columns // 8, 8)
    return gl.SwizzledSharedLayout(8, 8 // pieces, pieces, [1, 0])


@gluon.jit
def row_buffers(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """COUNT buffers [ROWS, DIM] in shared memory for the warps' own matrix steps."""
    PARTS: gl.constexpr = parts_of(DIM)
    made = ()
    for i in gl.static_range(len(PARTS)):
        made = made + (
            gl.allocate_shared_memory(
                dtype, [COUNT, ROWS, PARTS[i][1]], rows_layout(PARTS[i][1])
            ),
        )  # fmt: skip
    return made


@gluon.jit
def buffer_at(bufs, index):
    """One of some buffers."""
    found = ()
    for i in gl.static_range(len(bufs)):
        found = found + (bufs[i].index(index),)
    return found


@gluon.jit
def copy_part(desc, row, head, column, full, buf, HEADS: gl.constexpr):
    """Start to copy the rows of some tokens from `row` on, HEADS heads from `head` on, into a
    buffer [rows, columns]."""
    rows: gl.constexpr = buf.shape[0]
    to = buf.reshape([rows // HEADS, HEADS, buf.shape[1]])
    tma.async_copy_global_to_shared(desc, [row, head, column], full, to)


@gluon.jit
def copy_rows(descs, row, head, full, bufs, HEADS: gl.constexpr, DIM: gl.constexpr):
    """`copy_part` of all DIM columns."""
    PARTS: gl.constexpr = parts_of(DIM)
    for i in gl.static_range(len(PARTS)):
        copy_part(descs[i], row, head, PARTS[i][0], full, bufs[i], HEADS)


@gluon.jit
def copy_masked_rows(
    base, buffer, first_column, first, limit, stride_t, stride_h, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Start to copy rows first .. of a sequence, GROUP to a token, into a buffer [rows, width];
    zeros from row `limit` and column HEAD_DIM on."""
    width: gl.constexpr = buffer.shape[1]
    # At least as many rows as the layout has.
    chunk: gl.constexpr = 64 if width == 16 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    column = first_column + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    within = gl.arange(0, chunk, layout=gl.SliceLayout(1, layout))
    for c in gl.static_range(buffer.shape[0] // chunk):
        row = first + c * chunk + within
        at = (row // GROUP).to(gl.int64) * stride_t + row % GROUP * stride_h
        pointer = base + gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
        mask = gl.expand_dims(row < limit, 1) & gl.expand_dims(column < HEAD_DIM, 0)
        to = buffer.slice(c * chunk, chunk, 0)
        async_copy.async_copy_global_to_shared(to, pointer, mask=mask)


@gluon.jit
def start_scores(own, rows, S: gl.constexpr):
    """Start the product own rows^T, one chain over all columns."""
    scores = gl.full([own[0].shape[0], rows[0].shape[0]], 0.0, gl.float32, S)
    for i in gl.static_range(len(own)):
        scores = warpgroup_mma(
            own[i], rows[i].permute([1, 0]), scores, use_acc=i > 0, is_async=True
        )
    return scores


@gluon.jit
def finished(sums, LATER: gl.constexpr):
    """The sums, once no products but the LATER that were started last are under way."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(LATER, deps=sums),)
    else:
        return warpgroup_mma_wait(LATER, deps=sums)
