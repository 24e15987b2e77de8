"""Weights asked for ahead of their kernel's turn.

A launch that overlaps the end of the kernel ahead (programmatic dependent launch, sm_90) waits for
that kernel before it reads. Meanwhile it may ask for the first bytes of its weights in the
second-level cache: that reads nothing into the program, so it is in order also where the kernel
ahead writes the weights.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

PREFETCHED = tl.constexpr(64 << 10)
"""Most bytes of one weight that a program asks for. Some 200 programs run at a time, so theirs fit
the cache together."""
LINE = tl.constexpr(64)
"""Bytes of one request: the least that memory gives the cache at a time."""


@triton.jit
def prefetch_rows(weight, stride, first, num_rows, width, ROWS: tl.constexpr):
    """Ask for ROWS rows from `first` of weight [num_rows, width], the first bytes of each."""
    EACH: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = 512 // ROWS if ROWS < 512 else 1
    row = tl.minimum(first + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    line = weight + row[:, None] * stride
    most = tl.minimum(width, PREFETCHED // (LINE * ROWS) * EACH)
    for begin in tl.range(0, most, LINES * EACH):
        column = tl.minimum(begin + tl.arange(0, LINES) * EACH, width - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line + column[None, :]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
