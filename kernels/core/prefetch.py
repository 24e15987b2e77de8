"""A weight's first bytes on their way to the L2 cache while the kernel ahead still runs.

A launch that overlaps the end of the kernel ahead (programmatic dependent launch, sm_90) reads and
writes nothing before that kernel is done, since it may write what this one reads. Asking for lines
in the L2 cache is no read: all multiprocessors share that cache, so a later write by the kernel
ahead changes the line there. Whatever is prefetched, no bit depends on it.
Source: PTX ISA, `prefetch` and `griddepcontrol`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from rl_consistency.kernels.core.launch import next_power_of_2

LINE = tl.constexpr(128)
"""Bytes of a line of the cache."""

PREFETCHED_BYTES = 16 << 10
"""Bytes that a program asks for: what arrives while a short kernel ahead, a norm, still runs. With
twice as much a decode step took as long, with four times as much longer (H200)."""


def prefetched_columns(rows: int, columns: int, element_size: int, weights: int = 1) -> int:
    """How many columns of `rows` rows of so many `weights` are prefetched, a power of two."""
    line = LINE.value // element_size
    wanted = PREFETCHED_BYTES // (weights * rows * element_size)
    return max(line, min(wanted, next_power_of_2(columns)))


@triton.jit
def prefetch_rows(
    ptr, first, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Ask for COLUMNS columns of the ROWS rows from `first` of a matrix with dense rows."""
    ELEMENTS: tl.constexpr = LINE * 8 // ptr.dtype.element_ty.primitive_bitwidth
    # The last row and column stand in for what lies outside.
    row = tl.minimum(first + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    column = tl.minimum(tl.arange(0, COLUMNS // ELEMENTS) * ELEMENTS, num_columns - 1)
    prefetch_lines(ptr + row[:, None] * stride + column[None, :])


@triton.jit
def prefetch_lines(pointers):
    """Ask for the line of each of some pointers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
