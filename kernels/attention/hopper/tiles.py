"""What the sm_90 kernels of attention share: the halving tree, barriers, descriptors, and writing
out a tile of the forward pass."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rl_consistency.kernels.core.tile_descriptor import gluon_descriptor

LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
WARPS = gl.constexpr(4)
"""Warps of each group that holds rows of a tile."""
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "sanitize_overflow": False}
"""Of every launch. Checks of integer overflow are code in Triton's debug mode alone, but the front
end writes them in any mode, and takes half as long again."""
# Triton 3.7 has another name for it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def halve(x, R: gl.constexpr, N: gl.constexpr):
    """[R, N] -> [R, N // 2]: element i plus element i + N // 2."""
    low, high = x.reshape(R, 2, N // 2).permute(0, 2, 1).split()
    return low + high


@gluon.jit
def barriers(N: gl.constexpr):
    """N barriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())


@gluon.jit
def write_rows(
    OUT, LSE, m, lanes, acc, first, kv_head, start_row, q_len, stride_ot, stride_oh, stride_lse,
    columns, R: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Divide the sums of rows first .. first + R of a sequence and write o and lse: m [R] in log2
    units, lanes [R, 8] (the last three levels of the tree are left), acc [R, DIM], of which
    `columns` are written."""
    summed: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    # One thread per row: the last three levels of the tree stay in its registers.
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
    mask = gl.expand_dims(valid, 1) & gl.expand_dims(dim < columns, 0)
    gl.store(pointer, gl.convert_layout(out.to(OUT.dtype.element_ty), rows), mask=mask)
    lse = gl.convert_layout(lse, gl.SliceLayout(1, rows))
    gl.store(LSE + token_row * stride_lse + head, lse, mask=valid)


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
