"""Triton schedules of the gradient fold of outer products.

Shapes, dtypes, order, invariance: those of `gradient_fold`.
Errors: ValueError on a descriptor schedule for operands that descriptors cannot address.
Cost: a matrix product, plus one read and one write of the gradient.

A program loads its tile of the gradient, continues it and stores it. No program writes what another
reads, and no addition is atomic.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.device import dense_rows, has_tma, sm_count, takes_descriptors
from rl_consistency.kernels.core.launch import remembered, tile_descriptor
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.gradient_fold.schedules import FoldSchedule, pick
from rl_consistency.kernels.reduction.tree_fold_triton import halves, matrix_step

GROUP = 8
"""Rows of tiles that programs walk together, to share operands in the L2 cache."""


@triton.jit
def tile_of(index, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile; within GROUP rows, tiles are numbered column by column."""
    rows, columns = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    first = index // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = index % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def gradient_part(g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """Pointers [ROWS, COLUMNS] into the gradient from (n, k), and a mask of those inside it."""
    row = n + tl.arange(0, ROWS)
    column = k + tl.arange(0, COLUMNS)
    offsets = row.to(tl.int64)[:, None] * stride_gn + column.to(tl.int64)[None, :] * stride_gk
    return g_ptr + offsets, (row < N)[:, None] & (column < K)[None, :]


@triton.jit
def load_part(g_ptr, n, k, N, K, stride_gn, stride_gk, FRESH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    if FRESH:
        return tl.zeros((ROWS, COLUMNS), g_ptr.dtype.element_ty)
    pointers, inside = gradient_part(g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS, COLUMNS)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_part(acc, g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, HALVINGS: tl.constexpr):  # fmt: skip
    """Store `acc`, its columns halved HALVINGS times to save registers for pointers."""
    if HALVINGS:
        FURTHER: tl.constexpr = HALVINGS - 1
        left, right = halves(acc, ROWS, COLUMNS)
        store_part(left, g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS, COLUMNS // 2, FURTHER)
        middle = k + COLUMNS // 2
        store_part(right, g_ptr, n, middle, N, K, stride_gn, stride_gk, ROWS, COLUMNS // 2, FURTHER)
    else:
        pointers, inside = gradient_part(g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS, COLUMNS)
        tl.store(pointers, acc + 0.0, mask=inside)


@remembered
@triton.jit
def _outer_pointer_kernel(
    dy_ptr, x_ptr, g_ptr, T, N, K, stride_dy, stride_x, stride_gn, stride_gk,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    tile_n, tile_k = tile_of(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, GROUP)
    first_n, first_k = tile_n * BLOCK_N, tile_k * BLOCK_K
    acc = load_part(g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K)
    if dy_ptr.dtype.element_ty == tl.float32:
        acc = acc.to(tl.float64)
    n = first_n + tl.arange(0, BLOCK_N)
    k = first_k + tl.arange(0, BLOCK_K)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        row = t.to(tl.int64)[:, None]
        present = (t < T)[:, None]
        dy = tl.load(  # [BLOCK_T, BLOCK_N]
            dy_ptr + row * stride_dy + n[None, :], mask=present & (n < N)[None, :], other=0.0
        )
        x = tl.load(  # [BLOCK_T, BLOCK_K]
            x_ptr + row * stride_x + k[None, :], mask=present & (k < K)[None, :], other=0.0
        )
        acc = matrix_step(dy.T, x, acc)
    store_part(acc, g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K, 0)


@triton.jit
def outer_descriptor_tile(
    index, dy_desc, x_desc, extra_desc, g_ptr, begin, end, N, K, stride_gn, stride_gk,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTRA_N: tl.constexpr,
    EXTRA_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Continue one tile over the tokens from `begin` to `end`. The last block of tokens has zeros
    from `end` on, in the operands or beyond them."""
    EXTRA: tl.constexpr = EXTRA_N + EXTRA_K > 0
    HEIGHT: tl.constexpr = EXTRA_N if EXTRA_N else BLOCK_N
    WIDTH: tl.constexpr = EXTRA_K if EXTRA_K else BLOCK_K
    tile_n, tile_k = tile_of(index, N, K, BLOCK_N + EXTRA_N, BLOCK_K + EXTRA_K, GROUP)
    n, k = tile_n * (BLOCK_N + EXTRA_N), tile_k * (BLOCK_K + EXTRA_K)
    extra_n = n + BLOCK_N if EXTRA_N else n
    extra_k = k + BLOCK_K if EXTRA_K else k
    acc = load_part(g_ptr, n, k, N, K, stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K)
    if EXTRA:
        extra = load_part(g_ptr, extra_n, extra_k, N, K, stride_gn, stride_gk, FRESH, HEIGHT, WIDTH)
    # A descriptor reads zeros beyond the last token and column.
    remaining = end - begin
    for t in range(begin, end, BLOCK_T):
        dy = dy_desc.load([t, n])  # [BLOCK_T, BLOCK_N]
        x = x_desc.load([t, k])  # [BLOCK_T, BLOCK_K]
        acc = tl.dot(dy.T, x, acc)
        if EXTRA_N:
            extra = tl.dot(extra_desc.load([t, extra_n]).T, x, extra)
        if EXTRA_K:
            extra = tl.dot(dy.T, extra_desc.load([t, extra_k]), extra)
        remaining -= BLOCK_T
    # `none` is 0, which the compiler does not know. So it computes the pointers after the loop
    # instead of keeping them in registers.
    none = tl.maximum(remaining, 0)
    store_part(
        acc, g_ptr, n + none, k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K, 2 if EXTRA else 0
    )
    if EXTRA:
        store_part(
            extra, g_ptr, extra_n + none, extra_k, N, K, stride_gn, stride_gk, HEIGHT, WIDTH, 1
        )


# A version specialized for T = 1 would unroll the loop and keep operands beside the stored tile.
@remembered
@triton.jit(do_not_specialize=["T"])
def _outer_tma_kernel(
    dy_desc, x_desc, extra_desc, g_ptr, T, N, K, stride_gn, stride_gk,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTRA_N: tl.constexpr,
    EXTRA_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    if PERSISTENT:
        tiles = tl.cdiv(N, BLOCK_N + EXTRA_N) * tl.cdiv(K, BLOCK_K + EXTRA_K)
        for index in range(first, tiles, tl.num_programs(0)):
            outer_descriptor_tile(
                index, dy_desc, x_desc, extra_desc, g_ptr, 0, T, N, K, stride_gn, stride_gk,
                FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, GROUP,
            )  # fmt: skip
    else:
        outer_descriptor_tile(
            first, dy_desc, x_desc, extra_desc, g_ptr, 0, T, N, K, stride_gn, stride_gk,
            FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, GROUP,
        )  # fmt: skip


def launch_blocks(schedule: FoldSchedule) -> dict[str, Any]:
    """The constants and options of a launch that a schedule says, apart from its second part."""
    return {
        "BLOCK_N": schedule.block_n,
        "BLOCK_K": schedule.block_k,
        "BLOCK_T": schedule.block_t,
        "GROUP": GROUP,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "maxnreg": schedule.registers,
        "enable_fp_fusion": False,
    }


def fold_descriptors(dy: Tensor, x: Tensor, schedule: FoldSchedule) -> tuple[Any, Any, Any]:
    """Descriptors of dy, of x, and of the operand that only the second accumulator reads, which is
    unused without one."""
    extra = (
        (dy, schedule.extra_n) if schedule.extra_n else (x, schedule.extra_k or schedule.block_k)
    )
    of_dy, of_x, of_extra = (
        tile_descriptor(operand, (schedule.block_t, columns))
        for operand, columns in ((dy, schedule.block_n), (x, schedule.block_k), extra)
    )
    return of_dy, of_x, of_extra


def launch_outer(
    buffer: Tensor, dy: Tensor, x: Tensor, fresh: bool, schedule: FoldSchedule
) -> None:
    """Run one schedule on operands [T, N] and [T, K] with dense rows, T > 0."""
    if schedule.kind != "pointer" and not takes_descriptors(dy, x):
        raise ValueError(
            f"gradient_fold: schedule {schedule.kind!r} copies by descriptor, which needs 16-byte "
            f"aligned rows; strides are {dy.stride()} and {x.stride()}. Use a 'pointer' schedule."
        )
    tokens, n, k = dy.shape[0], dy.shape[1], x.shape[1]
    programs = schedule.tiles(n, k)
    if schedule.persistent:
        programs = min(programs, sm_count(buffer.device) * schedule.resident)
    sizes = (buffer, tokens, n, k)
    blocks = {"FRESH": fresh, **launch_blocks(schedule)}
    if schedule.kind == "tma":
        _outer_tma_kernel[(programs,)](
            *fold_descriptors(dy, x, schedule), *sizes, *buffer.stride(), EXTRA_N=schedule.extra_n,
            EXTRA_K=schedule.extra_k, PERSISTENT=schedule.persistent, **blocks,
        )  # fmt: skip
    else:
        _outer_pointer_kernel[(programs,)](
            dy, x, *sizes, dy.stride(0), x.stride(0), *buffer.stride(), **blocks
        )


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def gradient_fold_outer(buffer: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
    """`fold_outer` on CUDA; `buffer` is fp32, or fp64 for fp32 operands."""
    if min(*buffer.shape, dy.shape[0]) == 0:
        if fresh:
            buffer.zero_()
        return
    dy, x = dense_rows(dy), dense_rows(x)
    schedule = pick(
        dy.shape[0], *buffer.shape, dy.dtype,
        tma=has_tma(buffer.device) and takes_descriptors(dy, x),
        processors=sm_count(buffer.device), device=buffer.device,
    )  # fmt: skip
    launch_outer(buffer, dy, x, fresh, schedule)
