"""Gluon schedule of the outer-product fold for sm_90: nothing but operands passes shared memory.

Shapes, dtypes, order, invariance: those of `gradient_fold.fold_outer`, bf16 and fp16.
Errors: none here; `gradient_fold_triton.launch_outer` checks.
Cost: the loop of a matrix product; per tile one read and one write of the fp32 gradient, straight
    from and into the registers of the accumulator.

One warp copies operand tiles by descriptor into a ring of stages; the others multiply. The ring
runs on over the tiles of a persistent program, so that the operands of the next tile arrive while
the accumulator of the last one is stored and the next one's is loaded.
"""

# Triton gives the arguments of a kernel their meaning, and its types do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_consistency.kernels.gradient_fold_schedules import Schedule

COPY_REGISTERS = gl.constexpr(24)
"""A thread of the copying warp needs few; the least that a warp may give itself."""


@gluon.jit
def _tile_start(index, N, K, TILE_N: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr):
    """First row and column of a tile, GROUP rows of tiles at a time."""
    rows, columns = gl.cdiv(N, TILE_N), gl.cdiv(K, TILE_K)
    first = index // (GROUP * columns) * GROUP
    height = gl.minimum(rows - first, GROUP)
    within = index % (GROUP * columns)
    return (first + within % height) * TILE_N, within // height * TILE_K


@gluon.jit
def _gradient_tile(g_ptr, n, k, N, K, stride_gn, stride_gk, layout: gl.constexpr,
                   ROWS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """Pointers [ROWS, COLUMNS] of one accumulator, and which of them are inside."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    start = g_ptr + n.to(gl.int64) * stride_gn + k.to(gl.int64) * stride_gk
    rows = start + row.to(gl.int64) * stride_gn
    pointers = rows[:, None] + (column.to(gl.int64) * stride_gk)[None, :]
    return pointers, (row < N - n)[:, None] & (column < K - k)[None, :]


@gluon.jit
def _load_accumulator(g_ptr, n, k, N, K, stride_gn, stride_gk, layout: gl.constexpr,
                      ROWS: gl.constexpr, COLUMNS: gl.constexpr, FRESH: gl.constexpr,
                      WHOLE: gl.constexpr):  # fmt: skip
    pointers, inside = _gradient_tile(
        g_ptr, n, k, N, K, stride_gn, stride_gk, layout, ROWS, COLUMNS
    )
    if FRESH:
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout=layout)
    elif WHOLE:
        acc = gl.load(pointers)
    else:
        acc = gl.load(pointers, mask=inside, other=0.0)
    return acc


@gluon.jit
def _store_accumulator(acc, g_ptr, n, k, N, K, stride_gn, stride_gk, layout: gl.constexpr,
                       ROWS: gl.constexpr, COLUMNS: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    pointers, inside = _gradient_tile(
        g_ptr, n, k, N, K, stride_gn, stride_gk, layout, ROWS, COLUMNS
    )
    if WHOLE:
        gl.store(pointers, acc + 0.0)
    else:
        gl.store(pointers, acc + 0.0, mask=inside)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The stage after `slot`; the phase of its barriers turns when the ring begins again."""
    wrapped = slot == STAGES - 1
    return gl.where(wrapped, 0, slot + 1), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _multiply(
    dy_tiles, x_tiles, extra_tiles, ready, free, g_ptr, T, N, K, stride_gn, stride_gk,
    FRESH: gl.constexpr, WHOLE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    EXTRA_N: gl.constexpr, EXTRA_K: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    EXTRA: gl.constexpr = EXTRA_N + EXTRA_K > 0
    HEIGHT: gl.constexpr = EXTRA_N if EXTRA_N else BLOCK_N
    WIDTH: gl.constexpr = EXTRA_K if EXTRA_K else BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    beside: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    tiles = gl.cdiv(N, BLOCK_N + EXTRA_N) * gl.cdiv(K, BLOCK_K + EXTRA_K)
    slot, phase = 0, 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, k = _tile_start(index, N, K, BLOCK_N + EXTRA_N, BLOCK_K + EXTRA_K, GROUP)
        extra_n = n + BLOCK_N if EXTRA_N else n
        extra_k = k + BLOCK_K if EXTRA_K else k
        acc = _load_accumulator(
            g_ptr, n, k, N, K, stride_gn, stride_gk, layout, BLOCK_N, BLOCK_K, FRESH, WHOLE
        )
        if EXTRA:
            extra = _load_accumulator(
                g_ptr, extra_n, extra_k, N, K, stride_gn, stride_gk, beside, HEIGHT, WIDTH,
                FRESH, WHOLE,
            )  # fmt: skip
        last = slot
        for t in range(0, T, BLOCK_T):
            mbarrier.wait(ready.index(slot), phase)
            dy = dy_tiles.index(slot).permute((1, 0))  # [BLOCK_N, BLOCK_T]
            x = x_tiles.index(slot)  # [BLOCK_T, BLOCK_K]
            acc = warpgroup_mma(dy, x, acc, is_async=True)
            # Once no more than this step is under way, the step before has read its operands.
            if EXTRA:
                other = extra_tiles.index(slot)
                if EXTRA_N:
                    extra = warpgroup_mma(other.permute((1, 0)), x, extra, is_async=True)
                else:
                    extra = warpgroup_mma(dy, other, extra, is_async=True)
                acc, extra = warpgroup_mma_wait(2, deps=(acc, extra))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(free.index(last), pred=t > 0)
            last = slot
            slot, phase = _next(slot, phase, STAGES)
        if EXTRA:
            acc, extra = warpgroup_mma_wait(0, deps=(acc, extra))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(last))
        _store_accumulator(
            acc, g_ptr, n, k, N, K, stride_gn, stride_gk, layout, BLOCK_N, BLOCK_K, WHOLE
        )
        if EXTRA:
            _store_accumulator(
                extra, g_ptr, extra_n, extra_k, N, K, stride_gn, stride_gk, beside, HEIGHT, WIDTH,
                WHOLE,
            )  # fmt: skip


@gluon.jit
def _copy(
    dy_desc, x_desc, extra_desc, dy_tiles, x_tiles, extra_tiles, ready, free, T, N, K,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, EXTRA_N: gl.constexpr, EXTRA_K: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    tiles = gl.cdiv(N, BLOCK_N + EXTRA_N) * gl.cdiv(K, BLOCK_K + EXTRA_K)
    # A wait for the phase before a barrier's first one returns at once: every stage starts free.
    slot, phase = 0, 1
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, k = _tile_start(index, N, K, BLOCK_N + EXTRA_N, BLOCK_K + EXTRA_K, GROUP)
        for t in range(0, T, BLOCK_T):
            mbarrier.wait(free.index(slot), phase)
            barrier = ready.index(slot)
            # A copy always brings a whole tile: beyond the last token and column come zeros.
            mbarrier.expect(barrier, BLOCK_T * (BLOCK_N + EXTRA_N + BLOCK_K + EXTRA_K) * 2)
            tma.async_copy_global_to_shared(dy_desc, [t, n], barrier, dy_tiles.index(slot))
            tma.async_copy_global_to_shared(x_desc, [t, k], barrier, x_tiles.index(slot))
            if EXTRA_N:
                tma.async_copy_global_to_shared(
                    extra_desc, [t, n + BLOCK_N], barrier, extra_tiles.index(slot)
                )
            if EXTRA_K:
                tma.async_copy_global_to_shared(
                    extra_desc, [t, k + BLOCK_K], barrier, extra_tiles.index(slot)
                )
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _outer_hopper_kernel(
    dy_desc, x_desc, extra_desc, g_ptr, T, N, K, stride_gn, stride_gk,
    FRESH: gl.constexpr, WHOLE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    EXTRA_N: gl.constexpr, EXTRA_K: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = dy_desc.dtype
    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, BLOCK_N], dy_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, BLOCK_K], x_desc.layout)
    if EXTRA_N + EXTRA_K:
        extra_tiles = gl.allocate_shared_memory(
            dtype, [STAGES, BLOCK_T, EXTRA_N + EXTRA_K], extra_desc.layout
        )
    else:
        extra_tiles = x_tiles
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    dy_tiles, x_tiles, extra_tiles, ready, free, g_ptr, T, N, K,
                    stride_gn, stride_gk, FRESH, WHOLE, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K,
                    BLOCK_T, STAGES, GROUP, WARPS,
                ),
            ),
            (
                _copy,
                (
                    dy_desc, x_desc, extra_desc, dy_tiles, x_tiles, extra_tiles, ready, free,
                    T, N, K, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, STAGES, GROUP,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip


def outer_hopper(
    buffer: Tensor,
    dy: Tensor,
    x: Tensor,
    fresh: bool,
    schedule: Schedule,
    programs: int,
    group: int,
) -> None:
    """Launch over dy [T, N] and x [T, K], bf16 or fp16, whose rows descriptors can copy."""
    tokens, n, k = dy.shape[0], dy.shape[1], x.shape[1]
    tile_n, tile_k = schedule.tile
    dy_desc = _descriptor(dy, schedule.block_t, schedule.block_n)
    x_desc = _descriptor(x, schedule.block_t, schedule.block_k)
    if schedule.extra_n:
        extra_desc = _descriptor(dy, schedule.block_t, schedule.extra_n)
    else:
        extra_desc = _descriptor(x, schedule.block_t, schedule.extra_k or schedule.block_k)
    _outer_hopper_kernel[(programs,)](
        dy_desc,
        x_desc,
        extra_desc,
        buffer,
        tokens,
        n,
        k,
        *buffer.stride(),
        FRESH=fresh,
        WHOLE=n % tile_n == 0 and k % tile_k == 0,
        BLOCK_N=schedule.block_n,
        BLOCK_K=schedule.block_k,
        EXTRA_N=schedule.extra_n,
        EXTRA_K=schedule.extra_k,
        BLOCK_T=schedule.block_t,
        STAGES=schedule.stages,
        GROUP=group,
        WARPS=schedule.warps,
        num_warps=schedule.warps,
        maxnreg=schedule.registers,
        enable_fp_fusion=False,
    )


def _descriptor(operand: Tensor, tokens: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(
        operand, [tokens, columns], _layout(tokens, columns, operand.dtype)
    )


@cache
def _layout(tokens: int, columns: int, dtype: torch.dtype) -> Any:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([tokens, columns], element)
