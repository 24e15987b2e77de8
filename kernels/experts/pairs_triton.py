"""Pairs of rows and experts in the order of the experts, found on the device, and the kernels that
treat pairs and rows one by one: gathers, the gated activation, what lies between a pair's products
in backward, and the sum of a row's pairs.

A pair is a row that a sequence owns and one of its experts, numbered row * k + slot. Sorting is
counting: blocks of rows count their pairs of each expert; then every pair is stored at the place
that all counts give it.

Shapes: expert_ids [R, k] int32 -> pairs [R * k], places [R, k], first [E + 1], all int32.
    `combine_fwd`: outputs [R * k, H], places and weights [R, k] -> [R, H]. `pair_bwd`: gate and up
    [R * k, 2I], u [R * k, I] -> their gradients, the weighted activation [R * k, I], and dweights
    [R, k].
Dtypes and rounding points, order: those of `experts`; counts are exact.
Invariant to: the other rows and pairs, every field of a schedule.
Errors: none. A row whose ids are not ascending or are no experts' has no pairs, places of -2 and a
    sum of NaN; a row that no sequence owns has zeros.
Cost: two launches of fixed grids, one for few rows; nothing waits for the host. The others are
    memory-bound.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import dense_rows, has_tma
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.schedules import (
    RowSchedule,
    block_experts,
    block_rows,
    pick_combine,
    pick_pair,
)
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, activate_with_derivative, glu_value
from rl_consistency.kernels.reduction.tree_fold_triton import halve_across

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


@remembered
@triton.jit(do_not_specialize=["R"])
def combine_kernel(
    outputs_ptr, places_ptr, weights_ptr, y_ptr, R, H,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some columns of one row: its pairs, times their weights, by ascending expert."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    first = tl.load(places_ptr + row * TOP_K)
    if first >= 0:
        for slot in tl.static_range(TOP_K):
            place = tl.load(places_ptr + row * TOP_K + slot).to(tl.int64)
            part = tl.load(outputs_ptr + place * H + column, mask=column < H, other=0.0)
            part = part.to(tl.float32)
            if WEIGHTED:
                part = tl.load(weights_ptr + row * TOP_K + slot) * part
            acc = part if slot == 0 else acc + part
    if first == REFUSED:
        acc = tl.full((BLOCK_H,), float("nan"), tl.float32)
    tl.store(y_ptr + row * H + column, acc.to(y_ptr.dtype.element_ty), mask=column < H)


@remembered
@triton.jit
def gather_kernel(
    x_ptr, first_ptr, entries_ptr, y_ptr, H, E, stride_x, TOP_K: tl.constexpr,
    FILLED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some columns of the row of one entry; FILLED: zeros for a negative one."""
    place = tl.program_id(0)
    if place < tl.load(first_ptr + E):
        row = (tl.load(entries_ptr + place) // TOP_K).to(tl.int64)
        column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = column < H
        known = inside & (row >= 0) if FILLED else inside
        x = tl.load(x_ptr + row * stride_x + column, mask=known, other=0.0)
        tl.store(y_ptr + place.to(tl.int64) * H + column, x, mask=inside)


@remembered
@triton.jit
def activate_kernel(
    packed_ptr, first_ptr, y_ptr, N, E, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Some columns of the gated activation of one pair."""
    place = tl.program_id(0)
    if place < tl.load(first_ptr + E):
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = place.to(tl.int64) * (2 * N) + column
        gate = tl.load(packed_ptr + at, mask=column < N, other=0.0).to(tl.float32)
        up = tl.load(packed_ptr + N + at, mask=column < N, other=0.0).to(tl.float32)
        y = glu_value(gate, up, ACTIVATION).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + place.to(tl.int64) * N + column, y, mask=column < N)


@remembered
@triton.jit
def pair_kernel(
    packed_ptr, u_ptr, weights_ptr, first_ptr, pairs_ptr, dpacked_ptr, weighted_ptr, dweights_ptr,
    N, E, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One pair."""
    place = tl.program_id(0)
    if place < tl.load(first_ptr + E):
        pair = tl.load(pairs_ptr + place)
        weight = tl.load(weights_ptr + pair)
        column = tl.arange(0, BLOCK_N)
        inside = column < N
        at = place.to(tl.int64) * (2 * N) + column
        gate = tl.load(packed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(packed_ptr + N + at, mask=inside, other=0.0).to(tl.float32)
        own = place.to(tl.int64) * N + column
        u = tl.load(u_ptr + own, mask=inside, other=0.0).to(tl.float32)
        value, derivative = activate_with_derivative(gate, ACTIVATION)
        dtype = dpacked_ptr.dtype.element_ty
        activated = (value * up).to(dtype).to(tl.float32)
        product = tl.reshape(u * activated, (1, BLOCK_N))
        for level in tl.static_range(BLOCK_N.bit_length() - 1):
            product = halve_across(product, 1, BLOCK_N >> level)
        tl.store(dweights_ptr + pair + tl.arange(0, 1), tl.reshape(product, (1,)))
        dh = weight * u
        tl.store(dpacked_ptr + at, ((dh * up) * derivative).to(dtype), mask=inside)
        tl.store(dpacked_ptr + N + at, (dh * value).to(dtype), mask=inside)
        tl.store(weighted_ptr + own, (weight * activated).to(dtype), mask=inside)


def _by_columns(
    rows: int, columns: int, schedule: RowSchedule | None
) -> tuple[tuple[int, int], int, dict[str, int]]:
    """(grid, columns of a program, options) of a kernel with a row of so many columns each."""
    schedule = schedule or pick_combine(rows, columns)
    block = min(schedule.block, next_power_of_2(columns))
    return (rows, cdiv(columns, block)), block, {"num_warps": schedule.warps}


def combine_fwd(
    outputs: Tensor, places: Tensor, weights: Tensor | None, schedule: RowSchedule | None = None
) -> Tensor:
    """[R, H]: each row's pairs of outputs [R * k, H], times their weights if there are any."""
    (rows, top_k), hidden = places.shape, outputs.shape[1]
    y = outputs.new_empty((rows, hidden))
    weights = None if weights is None else weights.contiguous()
    grid, block, options = _by_columns(rows, hidden, schedule)
    overlap = has_tma(y.device)
    combine_kernel[grid](
        outputs, places, weights, y, rows, hidden, TOP_K=top_k, WEIGHTED=weights is not None,
        BLOCK_H=block, OVERLAP=overlap, launch_pdl=overlap, enable_fp_fusion=False, **options,
    )  # fmt: skip
    return y


def gather_rows(
    x: Tensor, entries: Tensor, first: Tensor, top_k: int, schedule: RowSchedule | None = None
) -> Tensor:
    """[n, W]: of x [*, W] the rows `entry // top_k`, or zeros for entries of -1, which only tables
    of steps have (`top_k` 1). Rows from the last expert's end, `first[E]`, hold anything."""
    x = dense_rows(x)
    width = x.shape[1]
    y = x.new_empty((len(entries), width))
    grid, block, options = _by_columns(len(entries), width, schedule)
    gather_kernel[grid](
        x, first, entries, y, width, len(first) - 1, x.stride(0), TOP_K=top_k, FILLED=top_k == 1,
        BLOCK_H=block, **options,
    )  # fmt: skip
    return y


def activate_pairs(
    packed: Tensor, first: Tensor, activation: str, schedule: RowSchedule | None = None
) -> Tensor:
    """[R * k, I]: the gated activation of gate and up [R * k, 2I]; `first` as in `pair_bwd`."""
    width = packed.shape[1] // 2
    y = packed.new_empty((len(packed), width))
    grid, block, options = _by_columns(len(packed), width, schedule)
    activate_kernel[grid](
        packed, first, y, width, len(first) - 1, ACTIVATION=ACTIVATIONS.index(activation),
        BLOCK_N=block, enable_fp_fusion=False, **options,
    )  # fmt: skip
    return y


def pair_bwd(
    packed: Tensor,
    u: Tensor,
    weights: Tensor,
    first: Tensor,
    pairs: Tensor,
    activation: str,
    schedule: RowSchedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dpacked [R * k, 2I], the weighted activation [R * k, I], and dweights [R, k] fp32."""
    weights = weights.contiguous()
    dpacked, weighted, dweights = map(torch.empty_like, (packed, u, weights))
    dweights.zero_()
    width = u.shape[1]
    schedule = schedule or pick_pair(width)
    pair_kernel[(len(pairs),)](
        packed, u, weights, first, pairs, dpacked, weighted, dweights, width, len(first) - 1,
        ACTIVATION=ACTIVATIONS.index(activation), BLOCK_N=next_power_of_2(width),
        num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return dpacked, weighted, dweights


expert_combine_op = kernel_op(
    fake=lambda outputs, places, *_: outputs.new_empty((places.shape[0], outputs.shape[1])),
    name="expert_combine_op",
)(combine_fwd)
expert_pair_bwd_op = kernel_op(
    fake=lambda packed, u, weights, *_: tuple(map(torch.empty_like, (packed, u, weights))),
    name="expert_pair_bwd_op",
)(pair_bwd)
