"""What the Gluon schedules of the forward attention order share: the tree, and how a tile ends."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportIndexIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
WARPS = gl.constexpr(4)
"""Of every group of warps that holds rows of a tile."""


@gluon.jit
def halve(x, R: gl.constexpr, N: gl.constexpr):
    """[R, N] -> [R, N // 2]: element i plus element i + N // 2."""
    low, high = x.reshape(R, 2, N // 2).permute(0, 2, 1).split()
    return low + high


@gluon.jit
def write_rows(
    OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh, stride_lse,
    R: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Divide the sums of rows first .. first + R of a sequence and write them.

    m [R] in log2 units, lanes [R, 8], acc [R, DIM].
    """
    summed: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    # One thread a row, so that the last three levels of the tree stay in its registers.
    single = gl.convert_layout(lanes, gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0]))
    total = halve(halve(halve(single, R, 8), R, 4), R, 2)
    length = gl.convert_layout(total.reshape(R), summed)
    maximum = gl.convert_layout(m, summed)
    seen = length > 0
    inverse = gl.div_rn(gl.full_like(length, 1.0), gl.where(seen, length, 1.0))
    out = acc * gl.expand_dims(inverse, 1) + 0.0
    lse = gl.where(seen, (maximum + gl.log2(length)) * LN2, NEG_INF)
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, rows))
    row = first + gl.arange(0, R, layout=gl.SliceLayout(1, rows))
    token_row = (start_row + row // GROUP).to(gl.int64)
    head = kv_head * GROUP + row % GROUP
    valid = row < q_len * GROUP
    pointer = (
        OUT + gl.expand_dims(token_row * stride_ot + head * stride_oh, 1)
        + gl.expand_dims(dim, 0)
    )  # fmt: skip
    mask = gl.expand_dims(valid, 1) & gl.expand_dims(dim < DIM, 0)
    gl.store(pointer, gl.convert_layout(out.to(OUT.dtype.element_ty), rows), mask=mask)
    lse = gl.convert_layout(lse, gl.SliceLayout(1, rows))
    gl.store(LSE + token_row * stride_lse + head, lse, mask=valid)
