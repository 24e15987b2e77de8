"""Schedules of the attention order on CUDA, and which one a call gets.

Every entry gives the same bytes, so a schedule may be chosen by any size, the number of queries
included. A test and `verify` run through the tables and compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_consistency.kernels.attention.hopper import decode as attention_decode
from rl_consistency.kernels.attention.hopper import forward as attention_hopper
from rl_consistency.kernels.attention.hopper.backward_chains import chain_bytes
from rl_consistency.kernels.attention.hopper.decode_fold import NARROWEST
from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences, PagedAttention
from rl_consistency.kernels.core.device import has_tma, has_wgmma, shared_memory, sm_count

LOG2E = 1.4426950408889634
NO_WINDOW = 1 << 30
UNSPECIALIZED = (
    "attention: specialised warps need sm_90, packed bf16 or fp16 operands, head_dim 64 or 128 and "
    "whole rows of heads; leave the schedule out to have one chosen."
)
NO_RING = (
    "attention: a ring of buffers needs sm_90, a paged cache, bf16 or fp16, head_dim 64 or 128 and "
    "rows 32 bytes apart; leave the schedule out to have one chosen."
)
SPLIT_ROWS = 16
"""Rows of a tile up to which its key blocks may be written out one by one."""
SPLIT_BYTES = 256 << 20
"""The most memory that blocks written out one by one may take; beyond it tiles are not split."""
SPREAD_ROWS = 256
"""Written rows of a tile from which its fold takes longer than waiting for all of its programs."""

FP32_SUMMED = 32
"""Keys of one fp32 step of dq, and queries of one of dk and dv; part of the order."""


def key_block(head_dim: int) -> int:
    """Keys in one step of the softmax fold on CUDA; part of the order."""
    return 128 if head_dim <= 128 else 64


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of the log-sum-exp kept for the backward pass: fp32 probabilities are recomputed from
    it, and its rounding would be the largest error of their gradients.
    """
    return torch.float64 if dtype == torch.float32 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a pass is cut into programs; every field is neutral to the bits."""

    rows: int
    """Rows of a program's tile."""
    keys: int = 0
    """Keys of a backward tile; the forward pass takes the order's key block."""
    warps: int
    """With `stages` fixed by the kernel where warps are specialised or there is a ring."""
    stages: int
    descriptors: bool = False
    """Whether packed keys are read through tensor descriptors (sm_90)."""
    specialized: bool = False
    """Whether warps are specialised (sm_90): `attention_hopper`, and backward
    `attention_backward_hopper`, one kernel for all three gradients."""
    ring: int = 0
    """Buffers through which paged keys and values are copied ahead (`attention_decode`, sm_90)."""
    fused: bool = False
    """Whether the blocks of a tile that a ring's programs share are folded by them, or by a kernel
    of its own."""
    spread: bool = False
    """Whether several of those programs fold, a slice of the columns each, where the whole launch
    is on the device at once; or the last of them folds all. Needs `fused` and a true `resident`."""
    resident: int = 2
    """Programs that a multiprocessor is given where the blocks of a tile are shared."""
    overlap: bool = False
    """Whether a ring's launch overlaps the end of the kernel ahead."""


PREFILL = (
    Schedule(rows=128, warps=12, stages=2, descriptors=True, specialized=True),
    Schedule(rows=128, warps=8, stages=2, descriptors=True),
    Schedule(rows=128, warps=8, stages=3, descriptors=True),
    Schedule(rows=128, warps=8, stages=2),
    Schedule(rows=64, warps=4, stages=2),
    Schedule(rows=64, warps=4, stages=1),
    Schedule(rows=16, warps=4, stages=2),
    Schedule(rows=16, warps=4, stages=1),
    Schedule(rows=16, warps=8, stages=1),
)
SPREAD, LAST, DEEP = (
    Schedule(rows=16, warps=4, stages=1, ring=3, fused=True, spread=True, resident=1, overlap=True),
    Schedule(rows=16, warps=4, stages=1, ring=3, fused=True, resident=1, overlap=True),
    Schedule(rows=16, warps=4, stages=1, ring=6, fused=True, spread=True, resident=1, overlap=True),
)
"""Few queries and a paged cache: long shared tiles, all others, and at most one tile for each
multiprocessor."""
DECODE = (
    SPREAD,
    LAST,
    DEEP,
    Schedule(rows=16, warps=4, stages=1, ring=3, fused=True),
    Schedule(rows=16, warps=4, stages=1, ring=3),
    Schedule(rows=16, warps=4, stages=1, ring=2, fused=True, resident=3, overlap=True),
    Schedule(rows=16, warps=4, stages=1, ring=5, resident=1, overlap=True),
    Schedule(rows=16, warps=4, stages=4),
    Schedule(rows=16, warps=4, stages=5),
    Schedule(rows=16, warps=8, stages=4),
    Schedule(rows=16, warps=8, stages=5),
    Schedule(rows=16, warps=4, stages=2),
    Schedule(rows=64, warps=4, stages=3),
    Schedule(rows=16, warps=4, stages=1),
    Schedule(rows=16, warps=8, stages=1),
)
BACKWARD_QUERIES = (
    Schedule(rows=128, keys=64, warps=8, stages=3, descriptors=True),
    Schedule(rows=128, keys=64, warps=8, stages=2, descriptors=True),
    Schedule(rows=128, keys=128, warps=8, stages=2, descriptors=True),
    Schedule(rows=64, keys=128, warps=4, stages=2, descriptors=True),
    Schedule(rows=128, keys=64, warps=8, stages=2),
    Schedule(rows=64, keys=64, warps=4, stages=2),
    Schedule(rows=64, keys=32, warps=8, stages=1),
    Schedule(rows=32, keys=32, warps=8, stages=1),
)
BACKWARD_KEYS = (
    Schedule(rows=64, keys=128, warps=12, stages=2, descriptors=True, specialized=True),
    Schedule(rows=64, keys=64, warps=4, stages=2, descriptors=True),
    Schedule(rows=64, keys=128, warps=8, stages=2, descriptors=True),
    Schedule(rows=64, keys=128, warps=8, stages=3, descriptors=True),
    Schedule(rows=32, keys=128, warps=8, stages=3, descriptors=True),
    Schedule(rows=32, keys=128, warps=8, stages=2),
    Schedule(rows=64, keys=64, warps=4, stages=2),
    Schedule(rows=32, keys=64, warps=8, stages=1),
    Schedule(rows=32, keys=32, warps=8, stages=1),
)


def pick_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, most_rows: int
) -> Schedule:
    half = q.dtype.itemsize == 2 and q.shape[2] <= 128
    if most_rows <= 64:
        if not half:
            return _wide(q, DECODE[-1])
        chosen = next(s for s in DECODE if admits(s, layout, q, k, v))
        return _pick_ring(q, k.shape[1], layout, most_rows) if chosen.ring else chosen
    if not half:
        return _wide(q, PREFILL[-1] if q.dtype == torch.float32 else PREFILL[5])
    if not has_tma(q.device):
        return PREFILL[4]
    return PREFILL[0] if admits(PREFILL[0], layout, q, k, v) else PREFILL[2]


def _pick_ring(q: Tensor, kv_heads: int, layout: AttentionLayout, most_rows: int) -> Schedule:
    """By the host's numbers, which bound those of a captured launch from above."""
    multiprocessors = sm_count(q.device)
    grid = len(layout.query_lens) * -(-most_rows // SPLIT_ROWS) * kv_heads
    blocks = -(-max(layout.context_lens) // key_block(q.shape[2]))
    if programs_for(grid, blocks, most_rows, q.shape[2], multiprocessors) > 1:
        return SPREAD if blocks * most_rows >= SPREAD_ROWS else LAST
    # A block is two buffers; where the ring would hold a whole context, nothing waits for depth.
    deep = grid <= multiprocessors and 2 * blocks > DEEP.ring
    return DEEP if deep else LAST


def forward_entries(table: tuple[Schedule, ...], dtype: torch.dtype) -> list[Schedule]:
    """The schedules of a forward table for a dtype: fp32 products hold their operands in registers,
    and taller tiles would keep them in local memory."""
    return [s for s in table if dtype != torch.float32 or (s.rows == SPLIT_ROWS and not s.ring)]


def _wide(q: Tensor, schedule: Schedule) -> Schedule:
    """The schedule of fp32 and of heads above 128, whose key blocks need much shared memory.

    Raises:
        ValueError: the device has less.
    """
    columns = triton.next_power_of_2(q.shape[2])
    needed = q.dtype.itemsize * columns * (schedule.rows + 2 * key_block(q.shape[2]))
    limit = shared_memory(q.device)
    if limit < needed:
        raise ValueError(
            f"attention: {q.dtype} with head_dim {q.shape[2]} needs {needed >> 10} KB of shared "
            f"memory for a block of keys and {q.device} has {limit >> 10} KB. Use a 16-bit dtype, "
            "a smaller head_dim, or a GPU of compute capability 8.0 or 9.0."
        )
    return schedule


def pick_backward(table: tuple[Schedule, ...], q: Tensor, dim: int) -> Schedule:
    """The table's schedule for one of the two kernels, dq's or that of dk and dv."""
    if q.dtype == torch.float32 or dim > 128:
        return table[-1]
    two = [s for s in table if not s.specialized]
    return two[0] if has_tma(q.device) else two[-3]


FIVE_PRODUCTS = next(s for s in BACKWARD_KEYS if s.specialized)
CHAIN_BYTES = 2 << 30
"""The most memory that the sums of dq may take; beyond it two kernels share the work."""


def in_five_products(layout: AttentionLayout, *operands: Tensor) -> bool:
    """Whether one kernel makes all gradients of a call, `operands` being do, q, k and v."""
    if not isinstance(layout, PackedSequences) or not admits(FIVE_PRODUCTS, layout, *operands):
        return False
    return chain_bytes(layout, *operands[1].shape[1:]) <= CHAIN_BYTES


def backward_entries(table: tuple[Schedule, ...], dtype: torch.dtype) -> list[Schedule]:
    """The schedules of a backward table for a dtype: fp32 takes a pinned step over what is summed,
    keys for dq and queries for dk and dv."""
    summed = attrgetter("keys" if table is BACKWARD_QUERIES else "rows")
    return [s for s in table if dtype != torch.float32 or summed(s) == FP32_SUMMED]


def programs_for(grid: int, most_blocks: int, most_rows: int, dim: int, places: int) -> int:
    """Enough programs to fill the device's `places`; 1 where the tiles alone do, and where their
    blocks would take more than `SPLIT_BYTES`."""
    if most_rows > SPLIT_ROWS or most_blocks < 4:
        return 1
    written = grid * most_blocks * triton.next_power_of_2(most_rows)
    if written * (dim + 11) * 4 > SPLIT_BYTES:
        return 1
    return max(1, min(most_blocks, places // grid))


def slices_for(grid: int, programs: int, dim: int, places: int) -> int:
    """Programs of a tile that fold a slice of its `dim` columns each: a power of two.

    1 where the launch has more programs than the device's `places`: those that fold slices wait
    for the others, which must be on the device with them.
    """
    if grid * programs > places:
        return 1
    most = max(1, min(programs, dim // NARROWEST))
    return 1 << (most.bit_length() - 1)


def admits(schedule: Schedule, layout: AttentionLayout, *operands: Tensor) -> bool:
    """Whether a schedule can run a call at all; what it needs of a device is found when it runs."""
    if not schedule.specialized and not schedule.ring:
        return True
    kind, kernels = (
        (PackedSequences, attention_hopper)
        if schedule.specialized
        else (PagedAttention, attention_decode)
    )
    fits = isinstance(layout, kind) and has_wgmma(operands[0].device)
    return fits and kernels.takes(*operands)


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it where the elements of a head do not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def sources(described: bool, box: list[int], *tensors: Tensor) -> list[Tensor | TensorDescriptor]:
    """Each [T, heads, D] tensor behind a descriptor of `box`, or as it is."""
    if not described:
        return list(tensors)
    return [TensorDescriptor(x, list(x.shape), list(x.stride()), box) for x in tensors]


def describable(*tensors: Tensor) -> bool:
    """Whether a tensor descriptor can address the tensors: sm_90, 16-byte aligned rows."""
    return all(
        has_tma(x.device)
        and x.data_ptr() % 16 == 0
        and x.stride(2) == 1
        and all(x.stride(i) * x.itemsize % 16 == 0 for i in (0, 1))
        for x in tensors
    )
