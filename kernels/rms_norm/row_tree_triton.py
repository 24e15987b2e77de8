"""The sum over a row in the RMSNorm order, and its mean, for Triton kernels.

A sum over an axis of two has one order, whatever registers its operands lie in. The tree is made of
such sums, so every layout gives the same bytes.
"""

# Pyright does not know what a kernel's constexpr arguments and loops are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_tree(x, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [R], N a power of two of at least 8: element i plus i + 4 of every eight
    neighbours, then i plus i + 2, then both; then the halving tree over the N / 8 groups.
    """
    x = tl.reshape(x, (R, N // 8, 8))
    for level in tl.static_range(3):
        x = tl.sum(tl.reshape(x, (R, N // 8, 2, 4 >> level)), axis=2)
    for level in tl.static_range(N.bit_length() - 4):
        x = tl.sum(tl.reshape(x, (R, 2, N >> (level + 4))), axis=1)
    return tl.reshape(x, (R,))


@triton.jit
def mean_of(total, R: tl.constexpr, H: tl.constexpr):
    """total [R] / H; the quotient by a power of two is the product with its inverse."""
    if H & (H - 1) == 0:
        return total * (1.0 / H)
    return tl.div_rn(total, tl.full((R,), H, tl.float32))
