"""acc + a b inside a Triton kernel: the step that every product over a long inner dimension takes.

For bf16 and fp16, an instruction of the matrix units adds the products of 16 elements of the inner
dimension to one fp32 accumulator. For fp32 there is no such instruction in IEEE arithmetic, and one
chain of fused multiply-adds over thousands of elements would lose more accuracy than a library that
sums in blocks. So an fp32 step is summed from zero and then added to an fp64 accumulator.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

FP32_STEP = 16
"""Elements of the inner dimension in one fp32 step. It is part of the order: every schedule for
fp32 operands holds this many at once."""


@triton.jit
def no_steps(M: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr):
    """The accumulator [M, N] of operands of a dtype before the first step."""
    return tl.zeros((M, N), tl.float64 if dtype == tl.float32 else tl.float32)


@triton.jit
def matrix_step(a, b, acc):
    """acc [M, N] + a [M, K] b [K, N]. For fp32 operands K is the order's step."""
    if a.dtype == tl.float32:
        acc += tl.dot(a, b, input_precision="ieee").to(tl.float64)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
