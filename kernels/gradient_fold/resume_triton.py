"""Accumulators of an earlier pass made to fit a gradient that may have been changed since.

Shapes: gradient and accumulators alike, contiguous.
Dtypes and rounding points: gradient fp32, bf16 or fp16; accumulators fp64 or fp32, whose sum is
    rounded once to fp32 and once more to a narrower gradient, as torch does.
Order: the accumulators are added in their order.
Errors: none.
Cost: one read of each; elements that were not changed are not written.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.remembered_launch import remembered

BLOCK = 1024


@remembered
@triton.jit(do_not_specialize=["count"])
def _resume_kernel(
    gradient_ptr, first_ptr, second_ptr, count, TWO: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    gradient = tl.load(gradient_ptr + offsets, mask=inside, other=0.0)
    total = tl.load(first_ptr + offsets, mask=inside, other=0.0)
    if TWO:
        total += tl.load(second_ptr + offsets, mask=inside, other=0.0)
    # A NaN counts as changed.
    same = total.to(tl.float32).to(gradient.dtype) == gradient
    changed = inside & (same == 0)
    tl.store(first_ptr + offsets, gradient.to(total.dtype), mask=changed)
    if TWO:
        tl.store(second_ptr + offsets, tl.zeros((BLOCK,), total.dtype), mask=changed)


def resume_accumulators(gradient: Tensor, first: Tensor, second: Tensor | None) -> None:
    """Where first + second, rounded, is not the gradient: first <- gradient, second <- 0.

    All are contiguous on CUDA and have one shape; both accumulators have one dtype.
    """
    count = gradient.numel()
    if count:
        _resume_kernel[(triton.cdiv(count, BLOCK),)](
            gradient, first, second, count, TWO=second is not None, BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
