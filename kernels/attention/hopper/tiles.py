"""What the sm_90 kernels of attention share: the halving tree, barriers, copies, scores, and
writing out a tile of the forward pass. A head is held as 64, 128 or 256 columns, with zeros past D.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from rl_consistency.kernels.core.launch import gluon_descriptor

LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
WARPS = gl.constexpr(4)
"""Warps of each group that holds rows of a tile."""
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "sanitize_overflow": False}
"""Options of every launch. Checks of integer overflow are code in Triton's debug mode alone, but
the front end writes them in any mode, and takes half as long again."""
# Triton 3.7 has another name for it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def halve(x, R: gl.constexpr, N: gl.constexpr):
    """[R, N] -> [R, N // 2]: element i plus element i + N // 2."""
    low, high = x.reshape(R, 2, N // 2).permute(0, 2, 1).split()
    return low + high


@gluon.jit
def keep_seen(scores, last, window, N: gl.constexpr, WINDOWED: gl.constexpr):
    """Scores [R, N] of a product, -inf where the column is after the row's `last` [R], or `window`
    or more before it."""
    column = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, scores.type.layout)), 0)
    # The column as a part of the thread and constants, which take no registers.
    own = column % 8 // 2 * 2
    rest = column // 8 * 8 + column % 2
    limit = gl.expand_dims(last, 1) - own
    seen = rest <= limit
    if WINDOWED:
        seen = seen & (rest > limit - window)
    return gl.where(seen, scores, NEG_INF)


@gluon.jit
def fresh_zero(step):
    """0 that the compiler takes for a new value at every step: it then computes addresses again
    instead of keeping them in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signal(barrier):
    """Arrive once, after all threads of this group of warps have come here."""
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def barriers(N: gl.constexpr):
    """N barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())


@gluon.jit
def buffers(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """COUNT buffers [ROWS, COLUMNS] in shared memory."""
    return gl.allocate_shared_memory(
        dtype, [COUNT, ROWS, COLUMNS],
        gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype),
    )  # fmt: skip


@gluon.jit
def copy_rows(desc, row, head, column, full, buf, HEADS: gl.constexpr):
    """Start to copy the rows of some tokens from `row` on, HEADS heads from `head` on, into a
    buffer [rows, columns]."""
    rows: gl.constexpr = buf.shape[0]
    to = buf.reshape([rows // HEADS, HEADS, buf.shape[1]])
    tma.async_copy_global_to_shared(desc, [row, head, column], full, to)


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
    """Start the product own rows^T."""
    scores = gl.full([own.shape[0], rows.shape[0]], 0.0, gl.float32, S)
    return warpgroup_mma(own, rows.permute([1, 0]), scores, use_acc=False, is_async=True)


@gluon.constexpr_function
def stored_layout(columns: int) -> gl.BlockedLayout:
    """How `write_rows` stores [R, columns]: 16 bytes a thread, whole rows a warp."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def own_stored_layout(columns: int) -> gl.DistributedLinearLayout:
    """How `write_rows` stores 64 rows [64, columns] that a product left with 16 in each warp: they
    stay there."""
    held, lanes = [[0, n] for n in (32, 64, 128) if n < columns], [[0, 8]]
    if columns == 16:
        lanes += [[1, 0], [2, 0], [4, 0], [8, 0]]
    else:
        lanes += [[0, 16], [1, 0], [2, 0], [4, 0]]
        held += [[8, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *held], lanes, [[16, 0], [32, 0]], [], [64, columns]
    )


LANES = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0]))
"""How `write_rows` adds lanes [R, 8]: a row in one thread's registers."""
OWN_LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 8],
    )
)
"""How `write_rows` adds lanes of rows as `own_stored_layout` has them: four threads add a row
alike."""


@gluon.jit
def _store_rows(
    results, out, lse, rows, strides, columns, FIRST: gl.constexpr, GROUP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Store o from column FIRST on, and lse with the first ones; see `write_rows`."""
    OUT, LSE = results
    first, kv_head, start_row, q_len = rows
    stride_ot, stride_oh, stride_lse = strides
    column = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, layout))
    row = first + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, layout))
    token_row = (start_row + row // GROUP).to(gl.int64)
    head = kv_head * GROUP + row % GROUP
    valid = row < q_len * GROUP
    place = gl.expand_dims(token_row * stride_ot + head * stride_oh, 1)
    pointer = OUT + FIRST + place + gl.expand_dims(column, 0)
    mask = gl.expand_dims(valid, 1) & gl.expand_dims(column < columns - FIRST, 0)
    gl.store(pointer, gl.convert_layout(out.to(OUT.dtype.element_ty), layout), mask=mask)
    if FIRST == 0:
        lse = gl.convert_layout(lse, gl.SliceLayout(1, layout))
        gl.store(LSE + token_row * stride_lse + head, lse, mask=valid)


@gluon.jit
def write_rows(
    results, m, lanes, acc, rows, strides, columns, GROUP: gl.constexpr, PARTS: gl.constexpr,
    STORED: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """Divide the sums of R rows of a sequence and write o and lse.

    m [R] in log2 units, lanes [R, 8] (the last three levels of the tree are left), acc [R, N] for
    each of PARTS, which are (first column, N); `columns` are written. `rows`: the first one, the KV
    head, the sequence's first row, its queries. `strides` of a token and a head in o, and of a
    token in lse. STORED gives a layout of acc and ADDED is one of lanes: see `stored_layout` and
    `LANES`.
    """
    R: gl.constexpr = lanes.shape[0]
    summed: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    single = gl.convert_layout(lanes, ADDED)
    total = halve(halve(halve(single, R, 8), R, 4), R, 2)
    length = gl.convert_layout(total.reshape(R), summed)
    maximum = gl.convert_layout(m, summed)
    seen = length > 0
    inverse = gl.div_rn(gl.full_like(length, 1.0), gl.where(seen, length, 1.0))
    out = (acc[0] * gl.expand_dims(inverse, 1) + 0.0,)
    for i in gl.static_range(1, len(acc)):
        own = gl.convert_layout(inverse, gl.SliceLayout(1, acc[i].type.layout))
        out = out + (acc[i] * gl.expand_dims(own, 1) + 0.0,)
    lse = gl.where(seen, (maximum + gl.log2(length)) * LN2, NEG_INF)
    for i in gl.static_range(len(out)):
        _store_rows(
            results, out[i], lse, rows, strides, columns, PARTS[i][0], GROUP,
            STORED(out[i].shape[1]),
        )  # fmt: skip


_BOXED: dict[tuple[object, ...], gl.NVMMASharedLayout] = {}


def descriptor(x: Tensor, box: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Any:
    """A descriptor of x, seen as `shape` and `strides`, that copies one box at a time."""
    key = (*box, x.dtype)
    if key not in _BOXED:
        kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
        _BOXED[key] = gl.NVMMASharedLayout.get_default_for(list(box), kind)
    return gluon_descriptor(x, box, shape, strides, _BOXED[key])


def head_descriptor(x: Tensor, tokens: int, heads: int, dim: int) -> Any:
    """A descriptor of [T, heads, D] that copies `tokens` by `heads` rows of `dim` columns, zeros
    past D: its box is (tokens, heads, dim)."""
    return descriptor(x, (tokens, heads, dim), x.shape, x.stride())
