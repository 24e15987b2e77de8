"""The backward pass of `token_logprobs` on CUDA: logit gradients.

Shapes: hidden [T, H], weight [V, H], or logits [T, V] fp32, and a table [6, T] of per-row numbers
    -> logit gradients [T, V] in the model dtype. `lm_head.py` has the products that follow.
Dtypes, order, invariance, errors: those of `token_logprobs`.
Cost: one product of [T, H] by [H, V], and one write of [T, V].

A second kernel rewrites each row's target entry; comparing every id with it would cost more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.reduction.tree_fold_triton import LOG2E, exp_fp32
from rl_consistency.kernels.sampling.statistics_triton import launch_options, scaled_logits
from rl_consistency.kernels.token_logprobs.forward_triton import (
    halves,
    launch_operand,
    launch_product,
    logits_tile,
    tile_position,
)
from rl_consistency.kernels.token_logprobs.schedules import GRADIENT_SCHEDULES

ELEMENTWISE_COLUMNS = 2048  # entries of one program that reads logits from memory
TABLE_ROWS = 128  # rows of one program that handles a few numbers per row


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
        row, column = tile_position(tile, num_rows, vocabulary, BLOCK_M, BLOCK_N, GROUP)
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
