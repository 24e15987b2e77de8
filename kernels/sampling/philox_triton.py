"""Uniform numbers of Philox-4x32-10 by key and counter, on CUDA.

Shapes: keys [n, 5] int64 (`rollout.device.random_stream` says what they mean), positions [n] int64
    -> [n] fp64.
Dtypes and rounding points: integers throughout; 53 bits fill an fp64 exactly.
Order: none; each number is computed by itself. Errors: none.
Cost: one launch, some hundred integer instructions a row.
Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.torch_op import kernel_op

ROWS = 128  # of one program
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
    num_rows = positions.shape[0]
    if num_rows:
        uniforms_kernel[(cdiv(num_rows, ROWS),)](
            keys, positions.contiguous(), uniforms, num_rows, *keys.stride(), R=ROWS, num_warps=4
        )
    return uniforms
