"""The LM head's product on CUDA, reduced over the vocabulary before it leaves the multiprocessor
(forward), or turned into logit gradients (backward).

Shapes: hidden [T, H] and weight [V, H] -> block statistics [3, blocks, T], target logits [T]; these
    or logits [T, V] fp32, and a table [6, T] of per-row numbers -> logit gradients [T, V] in the
    model dtype. `lm_head.py` has the products that follow.
Dtypes, order, invariance, errors: those of `token_logprobs`.
Cost: one product of [T, H] by [H, V] each way, and backward one write of [T, V]. A second kernel
    rewrites each row's target entry; comparing every id with it would cost more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.device import sm_count
from rl_consistency.kernels.core.launch import cdiv, remembered, tile_descriptor
from rl_consistency.kernels.core.reduction_order import FP32_STEP
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.matmul.product_triton import tile_position
from rl_consistency.kernels.reduction.tree_fold_triton import (
    LOG2E,
    exp_fp32,
    halves,
    matrix_step,
    no_steps,
)
from rl_consistency.kernels.sampling.vocabulary_triton import (
    VOCABULARY_BLOCK,
    block_statistics,
    empty_partials,
    launch_options,
    scaled_logits,
    store_statistics,
)
from rl_consistency.kernels.token_logprobs.schedules import (
    GRADIENT_SCHEDULES,
    STATISTICS_SCHEDULES,
    HeadSchedule,
)

TARGET_ROWS = 64  # rows per program of `target_kernel`
ELEMENTWISE_COLUMNS = 2048  # entries of one program that reads logits from memory
TABLE_ROWS = 128  # rows of one program that handles a few numbers per row
OUTSIDE = tl.constexpr(-1.0e38)  # for columns past the vocabulary: finite, and its exp is 0


@triton.jit
def pointer_steps(a_at, b_at, a_in, b_in, width, acc, BLOCK_K: tl.constexpr):
    """acc + a [M, width] b [width, N], read from pointers to their first BLOCK_K columns and rows
    where the masks [M, 1] and [1, N] are set."""
    inner = tl.arange(0, BLOCK_K)
    for k in range(tl.cdiv(width, BLOCK_K)):
        left = width - k * BLOCK_K
        a = tl.load(a_at + k * BLOCK_K, mask=a_in & (inner < left)[None, :], other=0.0)
        b = tl.load(b_at + k * BLOCK_K, mask=b_in & (inner < left)[:, None], other=0.0)
        acc = matrix_step(a, b, acc)
    return acc


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
        acc = pointer_steps(a_at, b_at, a_in, b_in, width, acc, BLOCK_K)
    return acc


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
        tile_m, tile_n = tile_position(tile, num_rows, vocabulary, BLOCK_M, BLOCK_N, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        z = logits_tile(
            hidden, weight, row, column, num_rows, vocabulary, width, hidden_stride, weight_stride,
            TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        rows = row + tl.arange(0, BLOCK_M)
        t = tl.load(temperature + rows, mask=rows < num_rows, other=1.0)
        parts = (z,) if BLOCK_N == VOCABULARY_BLOCK else halves(z, BLOCK_M, BLOCK_N)
        for half in tl.static_range(BLOCK_N // VOCABULARY_BLOCK):
            reduce_block(
                parts[half], t, partials, row, column + half * VOCABULARY_BLOCK, num_rows,
                vocabulary, num_blocks, plane, UNIT, BLOCK_M,
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
    acc = pointer_steps(a_at, b_at, mask[:, None], inside[None, :], width, acc, BLOCK_K)
    s = scaled_logits(acc.to(tl.float32), tl.load(temperature + row, mask=mask, other=1.0), UNIT)
    diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    # Adding -0 changes no number, not even +0, so any order of this sum gives the diagonal's bits.
    s = tl.sum(tl.where(diagonal, s, -0.0), axis=1)
    tl.store(scaled + row, tl.where(inside, s, float("nan")), mask=mask)


def launch_operand(tensor: Tensor, block: list[int], schedule: HeadSchedule) -> Any:
    """The tensor as the schedule's kernel takes it: by descriptor or by pointer."""
    return tile_descriptor(tensor, block) if schedule.kind == "tma" else tensor


def launch_product(
    kernel: Any,
    schedule: HeadSchedule,
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


@triton.jit
def gradient_of(
    z, table, plane, rows, num_rows, UNIT: tl.constexpr, PRECISE: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Logit gradients [R, C] of logits z, as if no entry were its row's target. PRECISE is for
    results stored in fp32; GUARD admits entries of -inf."""
    mask = rows < num_rows
    s = scaled_logits(z, tl.load(table + rows, mask=mask, other=1.0), UNIT)
    top = tl.load(table + plane + rows, mask=mask, other=0.0)
    log_normalizer = tl.load(table + 2 * plane + rows, mask=mask, other=0.0)
    a = tl.load(table + 3 * plane + rows, mask=mask, other=0.0)
    b = tl.load(table + 4 * plane + rows, mask=mask, other=0.0)
    u = (s - top[:, None]) - log_normalizer[:, None]
    p = exp_fp32(u) if PRECISE else tl.exp2(u * LOG2E)
    if GUARD:
        u = tl.where(u == -float("inf"), 0.0, u)
    return p * tl.fma(b[:, None], u, a[:, None])


@triton.jit
def store_gradient(
    z, table, plane, dlogits, row, column, num_rows, vocabulary, stride, UNIT: tl.constexpr,
    PRECISE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BLOCK_M)
    dz = gradient_of(z, table, plane, rows, num_rows, UNIT, PRECISE, False)
    if TMA:
        dlogits.store([row, column], dz.to(dlogits.dtype))
    else:
        columns = column + tl.arange(0, BLOCK_N)
        at = dlogits + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        inside = (rows < num_rows)[:, None] & (columns < vocabulary)[None, :]
        tl.store(at, dz.to(dlogits.dtype.element_ty), mask=inside)


@remembered
@triton.jit(do_not_specialize=["num_rows", "plane"])
def gradient_kernel(
    hidden, weight, table, dlogits, num_rows, vocabulary, width, hidden_stride, weight_stride,
    dlogits_stride, plane, UNIT: tl.constexpr, PRECISE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Store a tile in two halves, which leaves shared memory for the operands."""
    tiles = tl.cdiv(num_rows, BLOCK_M) * tl.cdiv(vocabulary, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_position(tile, num_rows, vocabulary, BLOCK_M, BLOCK_N, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        z = logits_tile(
            hidden, weight, row, column, num_rows, vocabulary, width, hidden_stride, weight_stride,
            TMA, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        parts = halves(z, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            store_gradient(
                parts[half], table, plane, dlogits, row, column + half * (BLOCK_N // 2), num_rows,
                vocabulary, dlogits_stride, UNIT, PRECISE, TMA, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=["num_rows", "plane"])
def row_gradient_kernel(
    logits, table, dlogits, num_rows, vocabulary, logits_stride, dlogits_stride, plane,
    UNIT: tl.constexpr, PRECISE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Logit gradients from logits that lie in memory."""
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = columns < vocabulary
    start = rows.to(tl.int64)[:, None]
    z = tl.load(logits + start * logits_stride + columns, mask=inside, other=0.0)  # [1, COLUMNS]
    dz = gradient_of(z, table, plane, rows, num_rows, UNIT, PRECISE, True)
    at = dlogits + start * dlogits_stride + columns
    tl.store(at, dz.to(dlogits.dtype.element_ty), mask=inside)


@remembered
@triton.jit(do_not_specialize=["num_rows"])
def gradient_table_kernel(
    temperature, top, log_normalizer, entropy, dlogprobs, dentropy, targets, table, num_rows,
    IGNORED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row's numbers: temperature, maximum, log-normalizer, a and b of dlogits = p*(a + b*u), and
    the target's extra term. The last three are 0 where the row is ignored or greedy."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    t = tl.load(temperature + row, mask=mask, other=0.0)
    active = (tl.load(targets + row, mask=mask, other=IGNORED) != IGNORED) & (t > 0)
    t = tl.where(t > 0, t, 1.0)
    h = tl.load(entropy + row, mask=mask, other=0.0)
    dlogprob = tl.load(dlogprobs + row, mask=mask, other=0.0)
    dh = tl.load(dentropy + row, mask=mask, other=0.0)
    a = tl.div_rn(-tl.fma(dh, h, dlogprob), t)
    b = tl.div_rn(-dh, t)
    tl.store(table + row, t, mask=mask)
    tl.store(table + num_rows + row, tl.load(top + row, mask=mask), mask=mask)
    normalizer = tl.load(log_normalizer + row, mask=mask)
    tl.store(table + 2 * num_rows + row, normalizer, mask=mask)
    tl.store(table + 3 * num_rows + row, tl.where(active, a, 0.0), mask=mask)
    tl.store(table + 4 * num_rows + row, tl.where(active, b, 0.0), mask=mask)
    onehot = tl.where(active, tl.div_rn(dlogprob, t), 0.0)
    tl.store(table + 5 * num_rows + row, onehot, mask=mask)


@remembered
@triton.jit(do_not_specialize=["num_rows", "plane"])
def target_gradient_kernel(
    table, logprobs, targets, dlogits, num_rows, vocabulary, stride, plane, PRECISE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Overwrite the logit gradient of each target."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    target = tl.load(targets + row, mask=mask, other=-1)
    mask = mask & (target >= 0) & (target < vocabulary)
    u = tl.load(logprobs + row, mask=mask, other=0.0)
    a = tl.load(table + 3 * plane + row, mask=mask, other=0.0)
    b = tl.load(table + 4 * plane + row, mask=mask, other=0.0)
    onehot = tl.load(table + 5 * plane + row, mask=mask, other=0.0)
    p = exp_fp32(u) if PRECISE else tl.exp2(u * LOG2E)
    u = tl.where(u == -float("inf"), 0.0, u)
    dz = tl.fma(p, tl.fma(b, u, a), onehot)
    at = dlogits + row.to(tl.int64) * stride + target
    tl.store(at, dz.to(dlogits.dtype.element_ty), mask=mask)


def _precise(dlogits: Tensor) -> bool:
    """Whether gradients keep more digits than exp2 of a rounded product has."""
    return dlogits.dtype == torch.float32


@kernel_op(fake=lambda temperature, *_: temperature.new_empty(6, temperature.shape[0]))
def token_gradient_table(
    temperature: Tensor,
    top: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor,
    targets: Tensor,
    ignored: int,
) -> Tensor:
    """Per-row numbers of the gradient kernels, [6, T] fp32, from [T] each."""
    num_rows = temperature.shape[0]
    table = temperature.new_empty(6, num_rows)
    if num_rows:
        gradient_table_kernel[(cdiv(num_rows, TABLE_ROWS),)](
            temperature, top, log_normalizer, entropy, dlogprobs, dentropy, targets, table,
            num_rows, **launch_options(IGNORED=ignored, ROWS=TABLE_ROWS),
        )  # fmt: skip
    return table


@kernel_op(fake=lambda *_: None, mutates=("dlogits",))
def token_gradient(
    hidden: Tensor,
    weight: Tensor,
    table: Tensor,
    dlogits: Tensor,
    unit_temperature: bool,
    schedule: str,
) -> None:
    """Write logit gradients, as if rows had no targets, into dlogits [T, V].

    `table` [6, T] may be columns of a wider one; `schedule` is a name of `GRADIENT_SCHEDULES`. Rows
    of dlogits must be padded to 16 bytes, since a descriptor stores whole lines.
    """
    if hidden.shape[0] == 0:
        return
    chosen = GRADIENT_SCHEDULES[schedule]
    launch_product(
        gradient_kernel, chosen, hidden, weight, table,
        launch_operand(dlogits, [chosen.block_m, chosen.block_n // 2], chosen), dlogits.stride(0),
        table.stride(0), UNIT=unit_temperature, PRECISE=_precise(dlogits),
    )  # fmt: skip


@kernel_op(fake=lambda *_: None, mutates=("dlogits",))
def token_row_gradient(
    logits: Tensor, table: Tensor, dlogits: Tensor, unit_temperature: bool
) -> None:
    """`token_gradient` from logits [T, V] fp32 in memory, -inf outside the support."""
    num_rows, vocabulary = logits.shape
    if num_rows == 0:
        return
    row_gradient_kernel[(num_rows, cdiv(vocabulary, ELEMENTWISE_COLUMNS))](
        logits, table, dlogits, num_rows, vocabulary, logits.stride(0), dlogits.stride(0),
        table.stride(0),
        **launch_options(
            UNIT=unit_temperature, PRECISE=_precise(dlogits), COLUMNS=ELEMENTWISE_COLUMNS
        ),
    )  # fmt: skip


@kernel_op(fake=lambda *_: None, mutates=("dlogits",))
def token_target_gradient(
    table: Tensor, logprobs: Tensor, targets: Tensor, dlogits: Tensor
) -> None:
    """Overwrite dlogits[t, targets[t]] with the gradient of a target."""
    num_rows, vocabulary = dlogits.shape
    if num_rows == 0:
        return
    target_gradient_kernel[(cdiv(num_rows, TABLE_ROWS),)](
        table, logprobs, targets, dlogits, num_rows, vocabulary, dlogits.stride(0), table.stride(0),
        **launch_options(PRECISE=_precise(dlogits), ROWS=TABLE_ROWS),
    )  # fmt: skip
