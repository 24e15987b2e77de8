"""The forward pass of `token_logprobs` on CUDA: the LM head's product, reduced over the vocabulary
before it leaves the multiprocessor.

Shapes, dtypes, order, invariance, errors: those of `token_logprobs`. Cost: one product of [T, H] by
[H, V].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.matrix_step import FP32_STEP, matrix_step, no_steps
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.tile_descriptor import tile_descriptor
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.sampling.statistics_triton import (
    VOCABULARY_BLOCK,
    block_statistics,
    empty_partials,
    launch_options,
    scaled_logits,
    store_statistics,
)
from rl_consistency.kernels.token_logprobs.schedules import STATISTICS_SCHEDULES, Schedule

TARGET_ROWS = 64  # rows per program of `target_kernel`
OUTSIDE = tl.constexpr(-1.0e38)  # for columns past the vocabulary: finite, and its exp is 0


@triton.jit
def tile_position(tile, num_rows, vocabulary, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP):
    """First row and column of a tile: GROUP row tiles are walked before the next column tile."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    width = GROUP * tl.cdiv(vocabulary, BLOCK_N)
    group = tile // width
    within = tile % width
    tall = tl.minimum(tiles_m - group * GROUP, GROUP)
    return (group * GROUP + within % tall) * BLOCK_M, (within // tall) * BLOCK_N


@triton.jit
def logits_tile(
    hidden, weight, row, column, num_rows, vocabulary, width, hidden_stride, weight_stride,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] logits in the matmul order; zeros outside."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TMA:
        for k in range(tl.cdiv(width, BLOCK_K)):
            a = hidden.load([row, k * BLOCK_K])  # [BLOCK_M, BLOCK_K]
            b = weight.load([column, k * BLOCK_K])  # [BLOCK_N, BLOCK_K]
            acc = tl.dot(a, b.T, acc)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        a_at = hidden + rows.to(tl.int64)[:, None] * hidden_stride + inner[None, :]
        b_at = weight + columns.to(tl.int64)[None, :] * weight_stride + inner[:, None]
        a_in = (rows < num_rows)[:, None]
        b_in = (columns < vocabulary)[None, :]
        for k in range(tl.cdiv(width, BLOCK_K)):
            left = width - k * BLOCK_K
            a = tl.load(a_at + k * BLOCK_K, mask=a_in & (inner < left)[None, :], other=0.0)
            b = tl.load(b_at + k * BLOCK_K, mask=b_in & (inner < left)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def halves(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> left and right [R, N // 2]."""
    return tl.split(tl.permute(tl.reshape(x, (R, 2, N // 2)), (0, 2, 1)))


@triton.jit
def reduce_block(
    z, temperature, partials, row, column, num_rows, vocabulary, num_blocks, plane,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Statistics of one vocabulary block of a tile: z [BLOCK_M, 128]."""
    s = scaled_logits(z, temperature, UNIT)
    if column + VOCABULARY_BLOCK > vocabulary:
        columns = column + tl.arange(0, VOCABULARY_BLOCK)
        s = tl.where((columns < vocabulary)[None, :], s, OUTSIDE)
    low, high = halves(s, BLOCK_M, VOCABULARY_BLOCK)
    top, sums, weighted = block_statistics(low, high, BLOCK_M, False)
    block = column // VOCABULARY_BLOCK
    rows = row + tl.arange(0, BLOCK_M)
    store_statistics(partials, plane, top, sums, weighted, rows, block, num_rows, num_blocks)


@remembered
@triton.jit(do_not_specialize=["num_rows", "plane"])
def statistics_kernel(
    hidden, weight, temperature, partials, num_rows, vocabulary, width, hidden_stride,
    weight_stride, num_blocks, plane,
    UNIT: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(num_rows, BLOCK_M) * tl.cdiv(vocabulary, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        row, column = tile_position(tile, num_rows, vocabulary, BLOCK_M, BLOCK_N, GROUP)
        z = logits_tile(
            hidden, weight, row, column, num_rows, vocabulary, width, hidden_stride, weight_stride,
            TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        rows = row + tl.arange(0, BLOCK_M)
        t = tl.load(temperature + rows, mask=rows < num_rows, other=1.0)
        if BLOCK_N == VOCABULARY_BLOCK:
            reduce_block(
                z, t, partials, row, column, num_rows, vocabulary, num_blocks, plane, UNIT, BLOCK_M
            )
        else:
            left, right = halves(z, BLOCK_M, BLOCK_N)
            reduce_block(
                left, t, partials, row, column, num_rows, vocabulary, num_blocks, plane, UNIT,
                BLOCK_M,
            )  # fmt: skip
            column += VOCABULARY_BLOCK
            reduce_block(
                right, t, partials, row, column, num_rows, vocabulary, num_blocks, plane, UNIT,
                BLOCK_M,
            )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def target_kernel(
    hidden, weight, targets, temperature, scaled, num_rows, vocabulary, width, hidden_stride,
    weight_stride, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each target's logit / temperature, NaN outside the vocabulary: the diagonal of a product with
    the targets' rows of the weight. No bit of a product depends on its tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    target = tl.load(targets + row, mask=mask, other=-1)
    inside = (target >= 0) & (target < vocabulary)
    inner = tl.arange(0, BLOCK_K)
    a_at = hidden + row.to(tl.int64)[:, None] * hidden_stride + inner[None, :]
    b_at = weight + target[None, :] * weight_stride + inner[:, None]
    acc = no_steps(ROWS, ROWS, hidden.dtype.element_ty)
    for k in range(tl.cdiv(width, BLOCK_K)):
        left = width - k * BLOCK_K
        a = tl.load(a_at + k * BLOCK_K, mask=mask[:, None] & (inner < left)[None, :], other=0.0)
        b = tl.load(b_at + k * BLOCK_K, mask=inside[None, :] & (inner < left)[:, None], other=0.0)
        acc = matrix_step(a, b, acc)
    s = scaled_logits(acc.to(tl.float32), tl.load(temperature + row, mask=mask, other=1.0), UNIT)
    diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    # Adding -0 changes no number, not even +0, so any order of this sum gives the diagonal's bits.
    s = tl.sum(tl.where(diagonal, s, -0.0), axis=1)
    tl.store(scaled + row, tl.where(inside, s, float("nan")), mask=mask)


def launch_operand(tensor: Tensor, block: list[int], schedule: Schedule) -> Any:
    """The tensor as the schedule's kernel takes it: by descriptor or by pointer."""
    return tile_descriptor(tensor, block) if schedule.kind == "tma" else tensor


def launch_product(
    kernel: Any,
    schedule: Schedule,
    hidden: Tensor,
    weight: Tensor,
    of_rows: Tensor,
    out: Any,
    *strides: int,
    **constants: bool,
) -> None:
    """Run a kernel over the tiles of hidden @ weight.T. It reads `of_rows` (temperatures, or the
    gradient table) and writes `out`; `strides` address both."""
    (num_rows, width), vocabulary = hidden.shape, weight.shape[0]
    tiles = cdiv(num_rows, schedule.block_m) * cdiv(vocabulary, schedule.block_n)
    programs = min(tiles, schedule.programs * sm_count(hidden.device))
    kernel[(programs,)](
        launch_operand(hidden, [schedule.block_m, schedule.block_k], schedule),
        launch_operand(weight, [schedule.block_n, schedule.block_k], schedule), of_rows, out,
        num_rows, vocabulary, width, hidden.stride(0), weight.stride(0), *strides, **constants,
        TMA=schedule.kind == "tma", BLOCK_M=schedule.block_m, BLOCK_N=schedule.block_n,
        BLOCK_K=schedule.block_k, GROUP=schedule.group, PROGRAMS=programs, FLATTEN=schedule.flatten,
        num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip


@kernel_op(fake=lambda hidden, weight, *_: empty_partials(len(hidden), len(weight), hidden.device))
def token_statistics(
    hidden: Tensor, weight: Tensor, temperature: Tensor, unit_temperature: bool, schedule: str
) -> Tensor:
    """Block statistics [3, blocks, T] fp32 of (hidden @ weight.T) / temperature, by the named entry
    of `STATISTICS_SCHEDULES`."""
    partials = empty_partials(hidden.shape[0], weight.shape[0], hidden.device)
    if hidden.shape[0]:
        launch_product(
            statistics_kernel, STATISTICS_SCHEDULES[schedule], hidden, weight, temperature,
            partials, partials.shape[1], partials.stride(0), UNIT=unit_temperature,
        )  # fmt: skip
    return partials


@kernel_op(fake=lambda hidden, weight, targets, temperature, *_: torch.empty_like(temperature))
def token_target_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, unit_temperature: bool
) -> Tensor:
    """Logit of each row's target / temperature: [T] fp32, NaN where the target is no token."""
    num_rows, width = hidden.shape
    scaled = torch.empty_like(temperature)
    if num_rows == 0:
        return scaled
    # An fp32 product keeps its operands in registers, so its tile must be small.
    rows, inner = (16, FP32_STEP) if hidden.dtype == torch.float32 else (TARGET_ROWS, 64)
    target_kernel[(cdiv(num_rows, rows),)](
        hidden, weight, targets, temperature, scaled, num_rows, weight.shape[0], width,
        hidden.stride(0), weight.stride(0),
        **launch_options(UNIT=unit_temperature, ROWS=rows, BLOCK_K=inner, num_stages=3),
    )  # fmt: skip
    return scaled
