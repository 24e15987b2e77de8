"""A token drawn from each row's distribution, and logprobs of given tokens, on CUDA.

Shapes: logits [T, V] fp32, per-row numbers [T] -> token ids [T] int64; with ids, logprobs [T] fp32.
Dtypes and rounding points: logprobs (logits / temperature - maximum) - log_normalizer in fp32, as
    in `token_logprobs`; their exp in fp32, then an integer.
Order: an id weighs floor(p * 2**52); integers add up exactly in any order.
Errors: none; the caller checks.
Cost: one read of the logits, and one block of 128 ids a row.

The uniform numbers that tokens are drawn with are Philox-4x32-10's by key and counter: keys
[n, 5] int64 (`rollout.device.random_stream` says what they mean), positions [n] int64 -> [n] fp64,
integers throughout; 53 bits fill an fp64 exactly.
Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv, next_power_of_2
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.reduction.tree_fold_triton import exp_fp32
from rl_consistency.kernels.sampling.statistics_triton import (
    BLOCK,
    VOCABULARY_BLOCK,
    launch_options,
    scaled_logits,
    supported,
)

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
