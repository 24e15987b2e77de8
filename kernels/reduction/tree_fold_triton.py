"""Sums and exponentials for Triton kernels, with the same bits in every register layout.

A product over a long inner dimension is a chain of steps. For bf16 and fp16, the matrix unit adds
the products of 16 elements to an fp32 accumulator. For fp32 it has no IEEE instruction, and one
chain of fused multiply-adds over thousands of elements would be less accurate than a library that
sums in blocks. So an fp32 step is summed from zero and then added to an fp64 accumulator.

The order of `tl.sum` depends on a tile's layout in registers, so two schedules of one op may
differ. The halving tree is therefore written out: element i + N/2 is added to element i, then N is
halved. It is the tree of `row_reduction` over a power of two.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.42860682030941723212e-6)


@triton.jit
def no_steps(M: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr):
    """The accumulator [M, N] before the first step of a product, for operands of `dtype`."""
    return tl.zeros((M, N), tl.float64 if dtype == tl.float32 else tl.float32)


@triton.jit
def matrix_step(a, b, acc):
    """acc [M, N] + a [M, K] b [K, N]; for fp32 operands K is `FP32_STEP`."""
    if a.dtype == tl.float32:
        acc += tl.dot(a, b, input_precision="ieee").to(tl.float64)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def halves(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> its left and right columns, each [R, N // 2]."""
    return tl.split(tl.permute(tl.reshape(x, (R, 2, N // 2)), (0, 2, 1)))


@triton.jit
def halve(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [R, N // 2]: element i plus element i + N // 2."""
    low, high = halves(x, R, N)
    return low + high


@triton.jit
def tree_fold(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [R]: the whole halving tree; N is a power of two."""
    for level in tl.static_range(N.bit_length() - 1):
        x = halve(x, R, N >> level)
    return tl.reshape(x, (R,))


@triton.jit
def halve_across(x, R: tl.constexpr, N: tl.constexpr):
    """The bits of `halve`, faster for a tile whose halves lie in different threads.

    The compiler exchanges elements by shuffles; for `halve` it would first move both to one thread.
    A sum of two elements has only one order.
    """
    return tl.sum(tl.reshape(x, (R, 2, N // 2)), axis=1)


@triton.jit
def fold_to_lanes(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [R, 8]: the tree without its last three levels; N is a power of two >= 8."""
    for level in tl.static_range(N.bit_length() - 4):
        x = halve(x, R, N >> level)
    return x


@triton.jit
def exp_fp32(x):
    """exp of fp32, about 1 ulp: -inf gives 0, NaN stays, results below the denormals are 0.

    `tl.exp` rounds x * log2(e), which costs |x| * 2**-24 of relative accuracy. This function
    subtracts the integer part first.
    """
    bounded = tl.minimum(tl.maximum(x, -104.0), 89.0)
    whole = tl.floor(tl.fma(bounded, LOG2E, 0.5))
    rest = tl.fma(whole, -LN2_LOW, tl.fma(whole, -LN2_HIGH, bounded))
    value = tl.exp2(rest * LOG2E)
    # 2**whole may be denormal or overflow; a factor with half of its exponent is neither.
    exponent = whole.to(tl.int32)
    half = exponent >> 1
    value = value * ((half + 127) << 23).to(tl.float32, bitcast=True)
    value = value * ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, value)
