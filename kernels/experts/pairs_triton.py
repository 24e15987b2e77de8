"""The pairs of rows and experts in the order of the experts, found on the device.

A pair is a row that a sequence owns and one of its experts, numbered row * k + slot. Sorting is
counting: blocks of rows count their pairs of each expert; then every pair is stored at the place
that all counts give it.

Shapes: expert_ids [R, k] int32 -> pairs [R * k], places [R, k], first [E + 1], all int32.
Dtypes and rounding points, order: none; counts are exact.
Errors: none. A row whose ids are not ascending or are no experts' has no pairs, and places of -2.
Cost: two launches of fixed grids, one for few rows; nothing waits for the host.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.schedules import block_experts, block_rows

SEQUENCES = 64
"""Sequences that a program compares its rows with at one time."""

NO_ROW = tl.constexpr(-1)
"""Place of a row that no sequence owns."""
REFUSED = tl.constexpr(-2)
"""Place of a row with impossible ids."""


@triton.jit
def owned_rows(block, start_ptr, len_ptr, R, S, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """[ROWS] the rows of a block; -1 for one that no sequence owns."""
    row = block * ROWS + tl.arange(0, ROWS)
    owned = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, S, SEQUENCES):
        sequence = begin + tl.arange(0, SEQUENCES)
        start = tl.load(start_ptr + sequence, mask=sequence < S, other=0)[None, :]
        length = tl.load(len_ptr + sequence, mask=sequence < S, other=0)[None, :]
        inside = (row[:, None] >= start) & (row[:, None] < start + length)
        owned = tl.maximum(owned, tl.max(inside.to(tl.int32), axis=1))
    return tl.where((owned > 0) & (row < R), row, -1)


@triton.jit
def members_of(row, ids_ptr, E, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """[ROWS, BLOCK_E] 1 where a row has an expert, and [ROWS] 1 where its ids are as they must be;
    both 0 for a row of -1."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    members = tl.zeros((ROWS, BLOCK_E), tl.int32)
    fits = (row >= 0).to(tl.int32)
    previous = tl.full((ROWS,), -1, tl.int32)
    for slot in range(TOP_K):
        own = tl.load(ids_ptr + row.to(tl.int64) * TOP_K + slot, mask=row >= 0, other=-1)
        fits = tl.where((own > previous) & (own < E), fits, 0)
        members = tl.where(own[:, None] == expert, 1, members)
        previous = own
    return tl.where(fits[:, None] > 0, members, 0), fits


@remembered
@triton.jit(do_not_specialize=["R", "S"])
def count_kernel(
    ids_ptr, start_ptr, len_ptr, counts_ptr, R, S, E,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, SEQUENCES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """How many pairs of each expert a block of rows has."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    row = owned_rows(block, start_ptr, len_ptr, R, S, ROWS, SEQUENCES)
    members, _ = members_of(row, ids_ptr, E, TOP_K, ROWS, BLOCK_E)
    expert = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + block * E + expert, tl.sum(members, axis=0), mask=expert < E)


@triton.jit
def counted(counts_ptr, block, blocks, E, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """[BLOCK_E] the pairs of each expert in the blocks before one, and in all."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    before = tl.zeros((BLOCK_E,), tl.int32)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for begin in range(0, blocks, BLOCK_B):
        other = begin + tl.arange(0, BLOCK_B)[:, None]
        counts = tl.load(
            counts_ptr + other * E + expert, mask=(other < blocks) & (expert < E), other=0
        )
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(other < block, counts, 0), axis=0)
    return before, total


@remembered
@triton.jit(do_not_specialize=["R", "S", "blocks"])
def place_kernel(
    ids_ptr, start_ptr, len_ptr, counts_ptr, pairs_ptr, places_ptr, first_ptr, R, S, E, blocks,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, SEQUENCES: tl.constexpr,
    ALONE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store a block's pairs at their places; ALONE: there is no other block, and no counts."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    row = owned_rows(block, start_ptr, len_ptr, R, S, ROWS, SEQUENCES)
    members, fits = members_of(row, ids_ptr, E, TOP_K, ROWS, BLOCK_E)
    expert = tl.arange(0, BLOCK_E)
    if ALONE:
        before = tl.zeros((BLOCK_E,), tl.int32)
        total = tl.sum(members, axis=0)
    else:
        before, total = counted(counts_ptr, block, blocks, E, ROWS, BLOCK_E)
    end = tl.cumsum(total, axis=0)
    if block == 0:
        tl.store(first_ptr + expert + 1, end, mask=expert < E)
        tl.store(first_ptr, 0)
    place = (end - total + before)[None, :] + tl.cumsum(members, axis=0) - members
    slot = tl.cumsum(members, axis=1) - members
    pair = row[:, None] * TOP_K + slot
    tl.store(pairs_ptr + place, pair, mask=members > 0)
    tl.store(places_ptr + pair, place, mask=members > 0)
    # Rows without pairs, each in its own place.
    here = block * ROWS + tl.arange(0, ROWS)
    none = tl.where(row >= 0, REFUSED, NO_ROW)
    for other in range(TOP_K):
        tl.store(places_ptr + here * TOP_K + other, none, mask=(here < R) & (fits == 0))


def _pairs_fake(
    expert_ids: Tensor, starts: Tensor, lens: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    pairs, places = expert_ids.new_empty(expert_ids.numel()), torch.empty_like(expert_ids)
    return pairs, places, expert_ids.new_empty(experts + 1)


@kernel_op(fake=_pairs_fake)
def expert_pairs_op(
    expert_ids: Tensor, starts: Tensor, lens: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of rows that sequences own, which begin at `starts` [S] and have `lens` rows.

    Returns int32:
        pairs: [R * k], row * k + slot of each pair, expert by expert, then by row; not written past
            the last one.
        places: [R, k], where each row's pairs stand in `pairs`; negative for none.
        first: [E + 1], where each expert's pairs begin; the last one is the number of pairs.
    """
    expert_ids = expert_ids.contiguous()
    pairs, places, first = _pairs_fake(expert_ids, starts, lens, experts)
    rows, top_k = expert_ids.shape
    if rows == 0:
        return pairs, places, first.zero_()
    overlap = has_tma(expert_ids.device)
    constants = {
        "TOP_K": top_k,
        "ROWS": block_rows(experts),
        "BLOCK_E": block_experts(experts),
        "SEQUENCES": SEQUENCES,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": 8,
    }
    blocks = cdiv(rows, block_rows(experts))
    counts = first
    if blocks > 1:
        counts = expert_ids.new_empty((blocks, experts))
        count_kernel[(blocks,)](
            expert_ids, starts, lens, counts, rows, starts.shape[0], experts, **constants
        )
    place_kernel[(blocks,)](
        expert_ids, starts, lens, counts, pairs, places, first, rows, starts.shape[0], experts,
        blocks, ALONE=blocks == 1, **constants,
    )  # fmt: skip
    return pairs, places, first
