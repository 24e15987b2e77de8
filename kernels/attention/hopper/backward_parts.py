"""Rows, sums and products of `hopper/backward.py`, in parts of the columns (`head_parts`)."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from rl_consistency.kernels.attention.hopper.head_parts import parts_of


@gluon.constexpr_function
def sums_layout(columns):
    """The layout of dk and dv [KEYS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def _operand_layout(columns):
    """The layout of what a product multiplies with rows of `columns` columns."""
    return gl.DotOperandLayout(operand_index=0, parent=sums_layout(columns), k_width=2)


@gluon.constexpr_function
def _loaded_layout(columns):
    """16 bytes a thread, whole rows a warp."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [8, 1], [1, 0])


@gluon.jit
def zeros(ROWS: gl.constexpr, DIM: gl.constexpr):
    """Sums [ROWS, DIM] of nothing."""
    PARTS: gl.constexpr = parts_of(DIM)
    made = ()
    for i in gl.static_range(len(PARTS)):
        made = made + (gl.full([ROWS, PARTS[i][1]], 0.0, gl.float32, sums_layout(PARTS[i][1])),)
    return made


@gluon.jit
def _places(
    X, first, start_row, head, limit, stride_t, stride_h, HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pointers to [ROWS, COLUMNS] of one head, and whether they are within the sequence and
    HEAD_DIM."""
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    offset = (start_row + row).to(gl.int64) * stride_t + head * stride_h
    pointer = X + gl.expand_dims(offset, 1) + gl.expand_dims(dim, 0)
    return pointer, gl.expand_dims(row < limit, 1) & gl.expand_dims(dim < HEAD_DIM, 0)


@gluon.jit
def load_rows(
    X, bufs, first, start_row, head, limit, stride_t, stride_h, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Fill a buffer [rows, DIM] from one head: zeros past the sequence and from column HEAD_DIM
    on."""
    PARTS: gl.constexpr = parts_of(DIM)
    for i in gl.static_range(len(PARTS)):
        pointer, mask = _places(
            X + PARTS[i][0], first, start_row, head, limit, stride_t, stride_h,
            HEAD_DIM - PARTS[i][0], bufs[i].shape[0], PARTS[i][1], _loaded_layout(PARTS[i][1]),
        )  # fmt: skip
        bufs[i].store(gl.load(pointer, mask=mask, other=0.0))


@gluon.jit
def write_gradient(
    X, sums, scale, first, start_row, head, limit, stride_t, stride_h, HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
):  # fmt: skip
    """Round `sums` times `scale` [rows, DIM] to HEAD_DIM columns of one head, up to the sequence's
    end."""
    PARTS: gl.constexpr = parts_of(DIM)
    for i in gl.static_range(len(PARTS)):
        _write_part(
            X + PARTS[i][0], sums[i] * scale + 0.0, first, start_row, head, limit, stride_t,
            stride_h, HEAD_DIM - PARTS[i][0],
        )  # fmt: skip


@gluon.jit
def _write_part(X, value, first, start_row, head, limit, stride_t, stride_h, COLUMNS: gl.constexpr):
    """`write_gradient` of one part, of which COLUMNS are written."""
    rows: gl.constexpr = value.shape[0]
    held: gl.constexpr = value.shape[1]
    layout: gl.constexpr = value.type.layout
    pointer, mask = _places(
        X, first, start_row, head, limit, stride_t, stride_h, COLUMNS, rows, held, layout
    )
    gl.store(pointer, value.to(X.dtype.element_ty), mask=mask)


@gluon.jit
def _place_of_sums(SUMS, entry, which: gl.constexpr, like, FIRST: gl.constexpr, DIM: gl.constexpr):
    """Where a program keeps one part of its sums of dk (0) or dv (1), from column FIRST on."""
    layout: gl.constexpr = like.type.layout
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    row = gl.expand_dims(gl.arange(0, rows, layout=gl.SliceLayout(1, layout)), 1)
    dim = gl.expand_dims(gl.arange(0, columns, layout=gl.SliceLayout(0, layout)), 0)
    first = (gl.load(entry + 5).to(gl.int64) * 2 + which) * (rows * DIM) + rows * FIRST
    return SUMS + first + row * columns + dim


@gluon.jit
def load_sums(SUMS, entry, which: gl.constexpr, like, DIM: gl.constexpr):
    """The sums [rows, DIM] that another program has left."""
    PARTS: gl.constexpr = parts_of(DIM)
    found = ()
    for i in gl.static_range(len(PARTS)):
        place = _place_of_sums(SUMS, entry, which, like[i], PARTS[i][0], DIM)
        found = found + (gl.load(place),)
    return found


@gluon.jit
def store_sums(SUMS, entry, which: gl.constexpr, sums, DIM: gl.constexpr):
    """Leave the sums [rows, DIM] to another program."""
    PARTS: gl.constexpr = parts_of(DIM)
    for i in gl.static_range(len(PARTS)):
        gl.store(_place_of_sums(SUMS, entry, which, sums[i], PARTS[i][0], DIM), sums[i])


@gluon.jit
def add_product(sums, left, rows):
    """Start to add the product left rows to `sums`; `left` is in registers."""
    added = ()
    for i in gl.static_range(len(sums)):
        operand = gl.convert_layout(left, _operand_layout(rows[i].shape[1]))
        added = added + (warpgroup_mma(operand, rows[i], sums[i], is_async=True),)
    return added


@gluon.jit
def add_transposed_product(sums, left, rows):
    """Start to add the product left^T rows to `sums`; `left` is in shared memory."""
    added = ()
    for i in gl.static_range(len(sums)):
        added = added + (warpgroup_mma(left.permute([1, 0]), rows[i], sums[i], is_async=True),)
    return added
