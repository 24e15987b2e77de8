"""Accumulators of earlier passes made to fit gradients that may have been changed since.

Shapes: a gradient and its accumulators are alike, contiguous, and start on 16 bytes.
Dtypes and rounding points: gradients fp32, bf16 or fp16; accumulators fp64 or fp32, whose sum is
    rounded once to fp32 and once more to a narrower gradient, as torch does.
Order: the accumulators are added in their order.
Errors: none.
Cost: one launch for all gradients of one kind, which reads each once; elements that were not
    changed are not written.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv

LINE_BYTES = 16
"""The start of every tensor is a multiple of this, so that threads copy whole lines."""

BLOCK = 4096
CHUNK = 16 * BLOCK
"""Elements of one program."""

MOST_TABLES = 16
"""Tables that are kept. Gradients and accumulators stay where they are for a step."""

NARROW = (torch.float32, torch.bfloat16, torch.float16)

_TRITON = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass(frozen=True)
class Resumed:
    """A gradient and what it is the rounded sum of."""

    gradient: Tensor
    first: Tensor
    second: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The gradient and what it is the sum of."""
        return [x for x in (self.gradient, self.first, self.second) if x is not None]

    @property
    def fits(self) -> bool:
        """Whether the kernel can do it."""
        gradient, first = self.gradient, self.first
        # The data of a gradient may have been exchanged since its accumulators were left.
        alike = all(
            x.shape == gradient.shape and x.device == gradient.device
            and x.is_contiguous() and x.data_ptr() % LINE_BYTES == 0
            for x in self.tensors
        )  # fmt: skip
        one_dtype = self.second is None or self.second.dtype == first.dtype
        return alike and one_dtype and gradient.dtype in NARROW


@triton.jit
def _resume_kernel(
    table_ptr, owners_ptr, GRADIENT: tl.constexpr, WIDE: tl.constexpr, TWO: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """CHUNK elements of one row of the table [tensors, 5] int64: three addresses, the number of
    elements, and the first of the tensor's programs. owners [programs] int64 names the row."""
    program = tl.program_id(0)
    row = table_ptr + tl.load(owners_ptr + program) * 5
    gradient_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(GRADIENT)), 16)
    first_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(WIDE)), 16)
    second_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(WIDE)), 16)
    count = tl.load(row + 3)
    start = (program - tl.load(row + 4)) * CHUNK
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < count
        gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
        total = tl.load(first_ptr + at, mask=inside, other=0.0)
        if TWO:
            total += tl.load(second_ptr + at, mask=inside, other=0.0)
        # A NaN counts as changed.
        same = total.to(tl.float32).to(GRADIENT) == gradient
        changed = inside & (same == 0)
        tl.store(first_ptr + at, gradient.to(WIDE), mask=changed)
        if TWO:
            tl.store(second_ptr + at, tl.zeros((BLOCK,), WIDE), mask=changed)


def resume_accumulators(all_resumed: Iterable[Resumed]) -> None:
    """Where first + second, rounded, is not the gradient: first <- gradient, second <- 0.

    All `fits`; they lie on one device.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[Resumed]] = {}
    for each in all_resumed:
        kind = each.gradient.dtype, each.first.dtype, each.second is not None
        if each.gradient.numel():
            kinds.setdefault(kind, []).append(each)
    for (narrow, wide, two), group in kinds.items():
        device = group[0].gradient.device
        # Another stream could read a table before it is copied, or after it was dropped.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        rows = tuple(
            (*(x.data_ptr() for x in each.tensors), each.gradient.numel()) for each in group
        )
        table, owners = _table(device, stream, rows)
        _resume_kernel[(len(owners),)](
            table, owners, GRADIENT=_TRITON[narrow], WIDE=_TRITON[wide], TWO=two, CHUNK=CHUNK,
            BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


@lru_cache(maxsize=MOST_TABLES)
def _table(
    device: torch.device, stream: int, rows: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, Tensor]:
    """What the kernel reads of gradients by their addresses and numbers of elements."""
    table, owners = [], []
    for index, (gradient, first, *second, count) in enumerate(rows):
        table += [gradient, first, *(second or [first]), count, len(owners)]
        owners += [index] * cdiv(count, CHUNK)
    numbers = torch.tensor([*table, *owners], dtype=torch.int64)
    if device.type == "cuda":
        # A copy from pageable memory would wait for all earlier launches.
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    read, programs = numbers.tensor_split([len(table)])
    return read, programs
