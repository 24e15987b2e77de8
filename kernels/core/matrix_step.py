"""acc + a b inside a Triton kernel: one step of a product over a long inner dimension.

For bf16 and fp16, the matrix unit adds the products of 16 elements to an fp32 accumulator. For fp32
it has no IEEE instruction, and one chain of fused multiply-adds over thousands of elements would be
less accurate than a library that sums in blocks. So an fp32 step is summed from zero and then added
to an fp64 accumulator.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

FP32_STEP = 16
"""Elements of the inner dimension in one fp32 step; part of the order."""


@triton.jit
def no_steps(M: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr):
    """The accumulator [M, N] before the first step, for operands of `dtype`."""
    return tl.zeros((M, N), tl.float64 if dtype == tl.float32 else tl.float32)


@triton.jit
def matrix_step(a, b, acc):
    """acc [M, N] + a [M, K] b [K, N]; for fp32 operands K is `FP32_STEP`."""
    if a.dtype == tl.float32:
        acc += tl.dot(a, b, input_precision="ieee").to(tl.float64)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
