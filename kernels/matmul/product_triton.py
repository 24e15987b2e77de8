"""Triton schedules of the matmul order: y = a b^T + bias or a b.

Shapes: a [M, K]; b [N, K] (layout "nt") or [K, N] ("nn"); bias [N] or None -> [M, N].
Dtypes, rounding points, order, invariance: those of `matmul`; no field of a `Schedule` changes a
    bit.
Errors: ValueError on a descriptor schedule for operands that descriptors cannot address.

Every launch turns off floating-point contraction, so that the compiler cannot fuse the addition of
the bias with anything.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import INTERPRETED, has_tma, sm_count, takes_descriptors
from rl_consistency.kernels.core.launch import cdiv, remembered, tile_descriptor
from rl_consistency.kernels.core.prefetch import prefetch_rows, prefetched_columns
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.matmul.schedules import Schedule, pick
from rl_consistency.kernels.reduction.tree_fold_triton import halves, matrix_step, no_steps

SHARED_BYTES = 227 * 1024
"""Shared memory of one program on sm_90. Pointer schedules use at most 99 KB."""

GROUP_M = 8
"""Row tiles that programs walk together per column tile, for reuse in L2."""


@triton.jit
def tile_position(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The row tile and the column tile of a tile's number."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    rows_in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % rows_in_group, within // rows_in_group


@triton.jit
def add_bias(acc, bias_ptr, columns, N, HAS_BIAS: tl.constexpr):
    """acc [M, N] + bias in fp32."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        acc = acc + bias.to(tl.float32)[None, :]
    return acc


@triton.jit
def tma_tile(
    tile, a_desc, b_desc, c_desc, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NT: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile of the result, copied by descriptors. With SWAP everything is
    transposed: acc [N, M] + b^T @ a^T."""
    tile_m, tile_n = tile_position(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        a = a_desc.load([row, k * BLOCK_K])  # [BLOCK_M, BLOCK_K]
        if NT:
            b = b_desc.load([column, k * BLOCK_K]).T  # [BLOCK_K, BLOCK_N]
        else:
            b = b_desc.load([k * BLOCK_K, column])
        acc = tl.dot(b.T, a.T, acc) if SWAP else tl.dot(a, b, acc)
    if SWAP:
        acc = acc.T
    if SPLIT:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_N // 2)
        left = add_bias(left, bias_ptr, columns, N, HAS_BIAS)
        c_desc.store([row, column], left.to(c_desc.dtype))
        right = add_bias(right, bias_ptr, columns + BLOCK_N // 2, N, HAS_BIAS)
        c_desc.store([row, column + BLOCK_N // 2], right.to(c_desc.dtype))
    else:
        acc = add_bias(acc, bias_ptr, column + tl.arange(0, BLOCK_N), N, HAS_BIAS)
        c_desc.store([row, column], acc.to(c_desc.dtype))


@remembered
@triton.jit(do_not_specialize=["M"])
def tma_kernel(
    a_desc, b_desc, c_desc, b_ptr, bias_ptr, M, N, K, stride_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NT: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    PERSISTENT: tl.constexpr, OVERLAP: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    """Tiles by descriptors: one per program, or every num_programs-th."""
    first = tl.program_id(0)
    if OVERLAP:
        # No load or store runs before the previous kernel ends: it may be an optimizer that writes
        # the weights.
        gdc_launch_dependents()
        if PREFETCHED > 0:
            _, tile_n = tile_position(first, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            prefetch_rows(b_ptr, tile_n * BLOCK_N, N, K, stride_b, BLOCK_N, PREFETCHED)
        gdc_wait()
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(first, tiles, tl.num_programs(0), flatten=True):
            tma_tile(
                tile, a_desc, b_desc, c_desc, bias_ptr, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, NT, SWAP, SPLIT, HAS_BIAS,
            )  # fmt: skip
    else:
        tma_tile(
            first, a_desc, b_desc, c_desc, bias_ptr, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, NT, SWAP, SPLIT, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def pointer_tile(
    tile, a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile of the result, any strides."""
    tile_m, tile_n = tile_position(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    steps = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + rows[:, None] * stride_am + steps[None, :] * stride_ak
    b_ptrs = b_ptr + steps[:, None] * stride_bk + columns[None, :] * stride_bn
    acc = no_steps(BLOCK_M, BLOCK_N, a_ptr.dtype.element_ty)
    for k in range(0, K, BLOCK_K):
        left = K - k
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (steps < left)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(steps < left)[:, None] & (columns < N)[None, :], other=0.0)
        acc = matrix_step(a, b, acc)
        # In 64 bits: BLOCK_K times a pitch of 2**25 elements exceeds 2**31.
        a_ptrs += tl.full((), BLOCK_K, tl.int64) * stride_ak
        b_ptrs += tl.full((), BLOCK_K, tl.int64) * stride_bk
    acc = add_bias(acc.to(tl.float32), bias_ptr, columns, N, HAS_BIAS)
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


@remembered
@triton.jit(do_not_specialize=["M"])
def pointer_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Tiles by pointers, one per program."""
    pointer_tile(
        tl.program_id(0), a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, HAS_BIAS,
    )  # fmt: skip


def _matmul_fake(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0 if layout == "nt" else 1]), dtype=out_dtype)


def matmul_fwd(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    layout: str,
    out_dtype: torch.dtype,
    schedule: Schedule | None = None,
) -> Tensor:
    """a [M, K] times b [N, K] ("nt") or [K, N] ("nn"), plus bias -> [M, N] in `out_dtype`.

    M, N and K are positive. `schedule` changes no bit; None picks one.
    """
    bias = None if bias is None else bias.contiguous()
    c = _matmul_fake(a, b, bias, layout, out_dtype)
    m, k = a.shape
    n = c.shape[1]
    b, layout = as_read(b, layout)
    fits = takes_descriptors(a, b, c)
    if schedule is None:
        tma = fits and has_tma(a.device)
        schedule = pick(m, n, k, a.dtype, layout, tma, out_dtype, a.device)
        schedule = schedule.within(SHARED_BYTES, a.element_size(), c.element_size())
    elif schedule.kind == "tma" and not fits:
        raise ValueError(
            f"matmul: schedule {schedule} copies by descriptor, which needs unit stride and "
            f"16-byte rows; got strides {a.stride()}, {b.stride()}, {c.stride()}. Use a pointer "
            "schedule."
        )
    block_m, block_n, block_k = schedule.block_m, schedule.block_n, schedule.block_k
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    options = launch_options(schedule) | {"HAS_BIAS": bias is not None}
    if schedule.kind == "pointer":
        bk, bn = b.stride() if layout == "nn" else b.t().stride()
        pointer_kernel[(tiles,)](
            a, b, c, bias, m, n, k, *a.stride(), bk, bn, c.stride(0), **options
        )  # fmt: skip
        return c
    # A tile of "nn" has few bytes of each row.
    asks = schedule.overlap and layout == "nt"
    tma_kernel[(min(tiles, sm_count(a.device)) if schedule.persistent else tiles,)](
        tile_descriptor(a, (block_m, block_k)),
        tile_descriptor(b, (block_n, block_k) if layout == "nt" else (block_k, block_n)),
        tile_descriptor(c, (block_m, block_n // 2 if schedule.split else block_n)),
        b, bias, m, n, k, b.stride(0), NT=layout == "nt", SWAP=schedule.swap, SPLIT=schedule.split,
        PERSISTENT=schedule.persistent, OVERLAP=schedule.overlap and not INTERPRETED,
        PREFETCHED=prefetched_columns(block_n, k, b.element_size()) if asks else 0,
        launch_pdl=schedule.overlap, **options,
    )  # fmt: skip
    return c


def as_read(b: Tensor, layout: str) -> tuple[Tensor, str]:
    """`b` and the layout as kernels read them: with dense rows, if it has any."""
    if b.stride(1) != 1 and b.stride(0) == 1:
        return b.t(), "nn" if layout == "nt" else "nt"
    return b, layout


def launch_options(schedule: Schedule) -> dict[str, Any]:
    """Launch arguments that all kernels of a schedule share."""
    return {
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "BLOCK_K": schedule.block_k,
        "GROUP_M": GROUP_M,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
    }


matmul_op = kernel_op(fake=_matmul_fake, name="matmul_op")(matmul_fwd)
