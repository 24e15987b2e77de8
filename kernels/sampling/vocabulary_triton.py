"""Rows of logits over the vocabulary, on CUDA: their maximum, normalizer and entropy, a token drawn
from each, and logprobs of given tokens.

Shapes: logits [T, V] fp32, per-row numbers [T] -> statistics [T] fp32, token ids [T] int64; with
    ids, logprobs [T] fp32.
Dtypes and rounding points: logprobs (logits / temperature - maximum) - log_normalizer in fp32, as
    in `token_logprobs`; their exp in fp32, then an integer.
Order: `sampling_support`; no tile and no number of warps changes it. `block_statistics` reduces
    blocks of 128 ids, whose logits come from memory (here) or from the LM head's product
    (`token_logprobs`); `vocabulary_combine` folds the blocks of a row. To a draw an id weighs
    floor(p * 2**52); integers add up exactly in any order.
Errors: none; the caller checks.
Cost: one read of the logits for the statistics and one for a draw, with a block of 128 ids a row.

Where rows truncate, `support_triton` finds a support [2, T] int32. Ids stay if their logit's key is
above `support[0]`, or equal to it and the id is at most `support[1]`. Other logits count as -inf.

The uniform numbers that tokens are drawn with are Philox-4x32-10's by key and counter: keys
[n, 5] int64 (`rollout.device.random_stream` says what they mean), positions [n] int64 -> [n] fp64,
integers throughout; 53 bits fill an fp64 exactly.
Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv, next_power_of_2
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.reduction.tree_fold_triton import (
    LOG2E,
    exp_fp32,
    halve_across,
    tree_fold,
)

BLOCK = 128  # vocabulary ids in one block of the order
VOCABULARY_BLOCK = tl.constexpr(BLOCK)
MOST_NEGATIVE = tl.constexpr(-3.0e38)


ROW_SCHEDULES = {"1x16": (1, 16, 4), "4x4": (4, 4, 4), "2x16": (2, 16, 8)}
"""Ways to walk rows of logits that lie in memory: name -> rows and vocabulary blocks of a program,
and its warps. "1x16" is in use; `verify` compares the others' bytes with it."""
COMBINE_ROWS = 4
SHIFT_COLUMNS = 2048


@triton.jit
def scaled_logits(z, temperature, UNIT: tl.constexpr):
    """z [R, C] / temperature [R], correctly rounded; UNIT says that every temperature is 1.

    A reciprocal and two fused steps round as a division does (Markstein 1990) and cost a third. An
    infinite quotient is kept: its correction would be NaN.
    """
    if UNIT:
        return z
    divisor = temperature[:, None]
    reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    quotient = z * reciprocal
    refined = tl.fma(tl.fma(-quotient, divisor, z), reciprocal, quotient)
    return tl.where(tl.abs(quotient) == float("inf"), quotient, refined)


@triton.jit
def order_key(z):
    """int32 that ranks as fp32 z does in a sort: -0 equals 0, NaN is highest, -inf above -2**31."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(z != z, 0x7FFFFFFF, key)


@triton.jit
def supported(s, column, support, row, plane, inside):
    """s [R, C] with -inf outside the supports [2, plane] of rows [R]; columns [R or 1, C]."""
    bound = tl.load(support + row, mask=inside, other=0)[:, None]
    last = tl.load(support + plane + row, mask=inside, other=0)[:, None]
    key = order_key(s)
    return tl.where((key > bound) | ((key == bound) & (column <= last)), s, -float("inf"))


@triton.jit
def block_statistics(low, high, R: tl.constexpr, GUARD: tl.constexpr):
    """A block s in two halves [R, 64] -> top = max s, the sum of e = exp(s - top) and the sum of
    e * (s - top), each [R]. GUARD admits entries and blocks of -inf; it changes no other bit."""
    top = tl.max(tl.maximum(low, high), axis=1)
    base = tl.where(top == -float("inf"), 0.0, top) if GUARD else top
    low -= base[:, None]
    high -= base[:, None]
    e_low, e_high = tl.exp2(low * LOG2E), tl.exp2(high * LOG2E)
    if GUARD:
        low, high = tl.maximum(low, MOST_NEGATIVE), tl.maximum(high, MOST_NEGATIVE)
    sums = e_low + e_high
    weighted = tl.fma(e_high, high, e_low * low)
    for level in tl.static_range(6):
        sums = halve_across(sums, R, 64 >> level)
        weighted = halve_across(weighted, R, 64 >> level)
    return top, tl.reshape(sums, (R,)), tl.reshape(weighted, (R,))


@triton.jit
def store_statistics(partials, plane, top, sums, weighted, row, block, num_rows, num_blocks):
    """Write a block's three numbers to partials [3, num_blocks, num_rows], `plane` apart."""
    at = partials + block.to(tl.int64) * num_rows + row
    mask = (row < num_rows) & (block < num_blocks)
    tl.store(at, top, mask=mask)
    tl.store(at + plane, sums, mask=mask)
    # Added twice because 2 * plane may exceed an int32.
    tl.store(at + plane + plane, weighted, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "plane"])
def row_statistics_kernel(
    logits, temperature, support, partials, num_rows, vocabulary, num_blocks, row_stride, plane,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS * BLOCKS) // BLOCKS  # [ROWS * BLOCKS]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, ROWS * BLOCKS) % BLOCKS
    inside = row < num_rows
    column = block[:, None] * VOCABULARY_BLOCK + tl.arange(0, VOCABULARY_BLOCK // 2)[None, :]
    at = logits + row.to(tl.int64)[:, None] * row_stride + column  # [ROWS * BLOCKS, 64]
    # Two loads put an id and its partner in the tree's first sum into one thread.
    low = tl.load(at, mask=inside[:, None] & (column < vocabulary), other=-float("inf"))
    column += VOCABULARY_BLOCK // 2
    at += VOCABULARY_BLOCK // 2
    high = tl.load(at, mask=inside[:, None] & (column < vocabulary), other=-float("inf"))
    t = tl.load(temperature + row, mask=inside, other=1.0)
    low, high = scaled_logits(low, t, UNIT), scaled_logits(high, t, UNIT)
    if support is not None:
        high = supported(high, column, support, row, num_rows, inside)
        low = supported(low, column - VOCABULARY_BLOCK // 2, support, row, num_rows, inside)
    top, sums, weighted = block_statistics(low, high, ROWS * BLOCKS, True)
    store_statistics(partials, plane, top, sums, weighted, row, block, num_rows, num_blocks)


@triton.jit(do_not_specialize=["num_rows", "plane"])
def combine_kernel(
    partials, folded, num_rows, num_blocks, plane, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """partials [3, num_blocks, num_rows] -> maximum, normalizer, weighted sum [3, num_rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.arange(0, BLOCKS)[None, :]
    inside = (row < num_rows) & (block < num_blocks)
    at = partials + block.to(tl.int64) * num_rows + row  # [ROWS, BLOCKS]
    tops = tl.load(at, mask=inside, other=-float("inf"))
    sums = tl.load(at + plane, mask=inside, other=0.0)
    weighted = tl.load(at + plane + plane, mask=inside, other=0.0)
    top = tl.max(tops, axis=1)
    # A block outside the support has the maximum -inf and weighs 0: -inf * 0 would be NaN.
    shift = tl.where(tops == -float("inf"), 0.0, tops - top[:, None])
    factor = tl.where(tops == -float("inf"), 0.0, exp_fp32(shift))
    weighted = tl.fma(sums, shift, weighted) * factor
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    tl.store(folded + row, top, mask=mask)
    tl.store(folded + num_rows + row, tree_fold(sums * factor, ROWS, BLOCKS), mask=mask)
    tl.store(folded + 2 * num_rows + row, tree_fold(weighted, ROWS, BLOCKS), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def shift_kernel(
    logits, temperature, support, shift, shifted, num_rows, vocabulary, row_stride,
    UNIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < vocabulary
    z = tl.load(logits + row * row_stride + column, mask=inside, other=0.0)  # [1, COLUMNS]
    one = tl.arange(0, 1)
    s = scaled_logits(z, tl.load(temperature + row + one), UNIT)
    if support is not None:
        s = supported(s, column, support, row + one, num_rows, row + one < num_rows)
    tl.store(shifted + row * vocabulary + column, s - tl.load(shift + row), mask=inside)


def empty_partials(num_rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Memory for the statistics of every block: [3, blocks, num_rows] fp32."""
    shape = (3, cdiv(vocabulary, BLOCK), num_rows)
    return torch.empty(shape, dtype=torch.float32, device=device)


def launch_options(warps: int = 4, **constants: bool | int) -> dict[str, Any]:
    """Launch options and constants of the kernels of this folder."""
    return {"num_warps": warps, "enable_fp_fusion": False, **constants}


@kernel_op(fake=lambda logits, *_: empty_partials(len(logits), logits.shape[1], logits.device))
def vocabulary_row_statistics(
    logits: Tensor,
    temperature: Tensor,
    unit_temperature: bool,
    support: Tensor | None = None,
    schedule: str = "1x16",
) -> Tensor:
    """Block statistics [3, blocks, T] fp32 of logits [T, V] fp32 / temperature [T]; `schedule` is a
    name of `ROW_SCHEDULES`."""
    num_rows, vocabulary = logits.shape
    partials = empty_partials(num_rows, vocabulary, logits.device)
    num_blocks = partials.shape[1]
    if num_rows == 0:
        return partials
    rows, blocks, warps = ROW_SCHEDULES[schedule]
    row_statistics_kernel[(cdiv(num_rows, rows), cdiv(num_blocks, blocks))](
        logits, temperature, support, partials, num_rows, vocabulary, num_blocks, logits.stride(0),
        partials.stride(0),
        **launch_options(warps, UNIT=unit_temperature, ROWS=rows, BLOCKS=blocks),
    )  # fmt: skip
    return partials


@kernel_op(fake=lambda partials: [partials.new_empty(partials.shape[2]) for _ in range(3)])
def vocabulary_combine(partials: Tensor) -> list[Tensor]:
    """Block statistics [3, blocks, T] -> [maximum, log-normalizer, entropy], each [T] fp32, all
    inside the op, where no compiler rewrites them."""
    _, num_blocks, num_rows = partials.shape
    folded = partials.new_empty(3, num_rows)
    if num_rows:
        combine_kernel[(cdiv(num_rows, COMBINE_ROWS),)](
            partials, folded, num_rows, num_blocks, partials.stride(0),
            **launch_options(8, ROWS=COMBINE_ROWS, BLOCKS=next_power_of_2(num_blocks)),
        )  # fmt: skip
    top, normalizer, weighted = folded.unbind(0)
    log_normalizer = normalizer.log()
    return [top.clone(), log_normalizer, log_normalizer - weighted / normalizer]


def _dense_like(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@kernel_op(fake=_dense_like)
def vocabulary_shifted(
    logits: Tensor,
    temperature: Tensor,
    shift: Tensor,
    unit_temperature: bool,
    support: Tensor | None = None,
) -> Tensor:
    """logits [T, V] / temperature [T] - shift [T]: [T, V] fp32, -inf outside the support."""
    num_rows, vocabulary = logits.shape
    shifted = _dense_like(logits)
    if shifted.numel() == 0:
        return shifted
    shift_kernel[(num_rows, cdiv(vocabulary, SHIFT_COLUMNS))](
        logits, temperature, support, shift, shifted, num_rows, vocabulary, logits.stride(0),
        **launch_options(UNIT=unit_temperature, COLUMNS=SHIFT_COLUMNS),
    )  # fmt: skip
    return shifted


UNIFORM_ROWS = 128  # rows per program of `uniforms_kernel`
ROUNDS = tl.constexpr(10)
WORD = tl.constexpr(0xFFFFFFFF)
MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
KEY_STEP_0 = tl.constexpr(0x9E3779B9)
KEY_STEP_1 = tl.constexpr(0xBB67AE85)


# Of keys that lie word by word the words' stride is the number of rows.
@triton.jit(do_not_specialize=["num_rows", "word_stride"])
def uniforms_kernel(keys, positions, uniforms, num_rows, row_stride, word_stride, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    mask = row < num_rows
    at = keys + row.to(tl.int64) * row_stride
    c0 = tl.load(positions + row, mask=mask, other=0).to(tl.uint64) & WORD
    c1 = tl.load(at + 2 * word_stride, mask=mask, other=0).to(tl.uint64)
    c2 = tl.load(at + 3 * word_stride, mask=mask, other=0).to(tl.uint64)
    c3 = tl.load(at + 4 * word_stride, mask=mask, other=0).to(tl.uint64)
    k0 = tl.load(at, mask=mask, other=0).to(tl.uint64)
    k1 = tl.load(at + word_stride, mask=mask, other=0).to(tl.uint64)
    for _ in tl.static_range(ROUNDS):
        product0 = c0 * MULTIPLIER_0  # 32 x 32 bits: exact in 64
        product1 = c2 * MULTIPLIER_1
        c0 = (product1 >> 32) ^ c1 ^ k0
        c2 = (product0 >> 32) ^ c3 ^ k1
        c1 = product1 & WORD
        c3 = product0 & WORD
        k0 = (k0 + KEY_STEP_0) & WORD
        k1 = (k1 + KEY_STEP_1) & WORD
    bits = ((c0 >> 5) << 26) | (c1 >> 6)  # 27 and 26 bits
    tl.store(uniforms + row, bits.to(tl.float64) * (2.0**-53), mask=mask)


@kernel_op(fake=lambda keys, at: at.new_empty(at.shape, dtype=torch.float64))
def philox_uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) of keys [n, 5] int64, any strides, and positions [n] int64: [n] fp64."""
    uniforms = torch.empty(positions.shape, dtype=torch.float64, device=positions.device)
    positions, num_rows = positions.contiguous(), positions.shape[0]
    if num_rows:
        uniforms_kernel[(cdiv(num_rows, UNIFORM_ROWS),)](
            keys, positions, uniforms, num_rows, *keys.stride(), R=UNIFORM_ROWS, num_warps=4
        )
    return uniforms


WEIGHT_BLOCKS = 16  # vocabulary blocks per program of `weights_kernel`
PICK_BLOCKS = 2048  # blocks whose weights are searched together
LOGPROB_ROWS = 128  # rows per program of `logprobs_kernel`
WEIGHT_UNIT = tl.constexpr(2.0**52)


@triton.jit
def logprobs_of(
    z, row, column, inside, temperature, support, top, log_normalizer, num_rows, UNIT: tl.constexpr
):
    """[R, C] logprobs of entries z of rows [R], -inf outside the support; columns [R or 1, C]."""
    s = scaled_logits(z, tl.load(temperature + row, mask=inside, other=1.0), UNIT)
    if support is not None:
        s = supported(s, column, support, row, num_rows, inside)
    s -= tl.load(top + row, mask=inside, other=0.0)[:, None]
    return s - tl.load(log_normalizer + row, mask=inside, other=0.0)[:, None]


@triton.jit
def integer_weights(logprobs):
    """floor(exp(logprobs) * 2**52), int64; 0 for NaN."""
    p = exp_fp32(logprobs)
    # A power of two changes the exponent alone, so fp32 holds the product.
    return (tl.where(p == p, p, 0.0) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def block_weights(
    block, row, logits, temperature, support, top, log_normalizer, num_rows, vocabulary, row_stride,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Integer weights of the ids of blocks [B] of one row: [B, 128] int64."""
    column = block[:, None] * VOCABULARY_BLOCK + tl.arange(0, VOCABULARY_BLOCK)[None, :]
    at = logits + row * row_stride + column
    z = tl.load(at, mask=column < vocabulary, other=-float("inf"))
    rows = row + tl.arange(0, 1)
    logprobs = logprobs_of(
        z, rows, column, rows < num_rows, temperature, support, top, log_normalizer, num_rows, UNIT
    )
    return integer_weights(logprobs)


@triton.jit(do_not_specialize=["num_rows"])
def weights_kernel(
    logits, temperature, support, top, log_normalizer, weights, num_rows, vocabulary, num_blocks,
    row_stride, UNIT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Weight of each block: weights [T, num_blocks] int64."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    found = block_weights(
        block, row, logits, temperature, support, top, log_normalizer, num_rows, vocabulary,
        row_stride, UNIT,
    )  # fmt: skip
    tl.store(weights + row * num_blocks + block, tl.sum(found, axis=1), mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_rows"])
def pick_kernel(
    logits, temperature, support, top, log_normalizer, weights, uniforms, token_ids, num_rows,
    vocabulary, num_blocks, row_stride,
    UNIT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first id with a cumulative weight above min(floor(u * total), total - 1)."""
    row = tl.program_id(0).to(tl.int64)
    weights += row * num_blocks
    total = tl.full((), 0, tl.int64)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        total += tl.sum(tl.load(weights + block, mask=block < num_blocks, other=0))
    threshold = (tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64)
    # u * total may round up to the total, which means the last id with any weight.
    threshold = tl.minimum(threshold, total - 1)
    passed = 0
    before = tl.full((), 0, tl.int64)
    seen = tl.full((), 0, tl.int64)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        weight = tl.load(weights + block, mask=block < num_blocks, other=0)
        cumulative = seen + tl.cumsum(weight)
        below = (cumulative <= threshold) & (block < num_blocks)
        passed += tl.sum(below.to(tl.int32))
        before += tl.sum(tl.where(below, weight, 0))
        seen += tl.sum(weight)
    found = block_weights(
        passed + tl.arange(0, 1), row, logits, temperature, support, top, log_normalizer, num_rows,
        vocabulary, row_stride, UNIT,
    )  # fmt: skip
    cumulative = before + tl.cumsum(tl.reshape(found, (VOCABULARY_BLOCK,)))
    within = tl.sum((cumulative <= threshold).to(tl.int32))
    tl.store(token_ids + row, (passed * VOCABULARY_BLOCK + within).to(tl.int64))


@triton.jit(do_not_specialize=["num_rows"])
def logprobs_kernel(
    logits, temperature, support, top, log_normalizer, token_ids, logprobs, num_rows, vocabulary,
    row_stride, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Logprob of one id of each row; NaN for an id outside the vocabulary."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    column = tl.load(token_ids + row, mask=inside, other=-1)
    known = (column >= 0) & (column < vocabulary)
    at = logits + row.to(tl.int64) * row_stride + column
    z = tl.load(at, mask=known, other=float("nan"))
    found = logprobs_of(
        z[:, None], row, column[:, None], inside, temperature, support, top, log_normalizer,
        num_rows, UNIT,
    )  # fmt: skip
    found = tl.where(known, tl.reshape(found, (ROWS,)), float("nan"))
    tl.store(logprobs + row, found, mask=inside)


@kernel_op(fake=lambda logits, *_: logits.new_empty((logits.shape[0],), dtype=torch.int64))
def vocabulary_draw(
    logits: Tensor,
    temperature: Tensor,
    support: Tensor | None,
    top: Tensor,
    log_normalizer: Tensor,
    uniforms: Tensor,
    unit_temperature: bool,
) -> Tensor:
    """Token ids [T] int64 at uniforms [T] fp64 in [0, 1); 0 where a row's weights are all 0 or NaN.

    The other arguments are the fields of `ReducedDistribution`.
    """
    num_rows, vocabulary = logits.shape
    token_ids = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    num_blocks = cdiv(vocabulary, BLOCK)
    weights = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    rows = (logits, temperature, support, top, log_normalizer, weights)
    sizes = (num_rows, vocabulary, num_blocks, logits.stride(0))
    options = launch_options(UNIT=unit_temperature)
    weights_kernel[(num_rows, cdiv(num_blocks, WEIGHT_BLOCKS))](
        *rows, *sizes, BLOCKS=WEIGHT_BLOCKS, **options
    )
    blocks = min(PICK_BLOCKS, next_power_of_2(num_blocks))
    pick_kernel[(num_rows,)](
        *rows, uniforms.contiguous(), token_ids, *sizes, BLOCKS=blocks, **options
    )
    return token_ids


@kernel_op(fake=lambda logits, *_: logits.new_empty((logits.shape[0],)))
def vocabulary_logprobs(
    logits: Tensor,
    temperature: Tensor,
    support: Tensor | None,
    top: Tensor,
    log_normalizer: Tensor,
    token_ids: Tensor,
    unit_temperature: bool,
) -> Tensor:
    """Logprobs [T] fp32 of token ids [T] int64; the other arguments as in `vocabulary_draw`."""
    num_rows, vocabulary = logits.shape
    logprobs = torch.empty_like(log_normalizer)
    if num_rows:
        logprobs_kernel[(cdiv(num_rows, LOGPROB_ROWS),)](
            logits, temperature, support, top, log_normalizer, token_ids.contiguous(), logprobs,
            num_rows, vocabulary, logits.stride(0),
            **launch_options(UNIT=unit_temperature, ROWS=LOGPROB_ROWS),
        )  # fmt: skip
    return logprobs
