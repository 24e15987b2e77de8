"""acc + a b inside a Triton kernel: the step that every product over a long inner dimension takes.

bf16 and fp16 have matrix units, whose instruction takes 16 elements of the inner dimension into one
fp32 accumulator. fp32 has none in IEEE arithmetic, and one chain of fused multiply-adds over
thousands of elements would round far more often than a library that blocks its sum. So an fp32 step
is a sum of its own, from zero, added to an fp64 accumulator when it is complete.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

FP32_STEP = 16
"""Elements of the inner dimension in one fp32 step: part of the order, so every schedule that
multiplies fp32 operands holds as many at once."""


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
