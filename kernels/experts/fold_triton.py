"""Gradients of expert weights: the runs, found on the device, and the fold over them.

A run is the rows of one sequence at one expert, by position. Tables of steps list the rows and the
pairs of every run, filled up to a multiple of 16 with -1, the runs of an expert in the order of the
sequences. Each expert's part of a table is filled up to a multiple of `BLOCK_STEPS`, so that a
block of steps never has two experts.

Shapes: expert_ids and places [R, k] -> tables of at most `most_steps` entries, int32; g [E, N, K],
    dy and x [pairs, ...] or [rows, ...]; `Runs` lists what each step takes.
Dtypes and rounding points: those of `gradient_fold`; counts are exact.
Order: `experts.ORDER`.
Invariant to: every field of a schedule.
Errors: ValueError on sequences that share rows, and on a descriptor schedule for rows that
    descriptors cannot address.
Cost: two launches and some sums of counts, without waiting for the host; a grouped product, plus
    one read and one write of the gradients of experts with rows. Schedules by descriptor first copy
    both operands in the order of the runs, zeros for filler.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout, from_host
from rl_consistency.kernels.core.device import DESCRIPTOR_BYTES, dense_rows, has_tma, sm_count
from rl_consistency.kernels.core.launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.pairs_triton import gather_rows, members_of
from rl_consistency.kernels.experts.schedules import (
    BLOCK_STEPS,
    block_experts,
    block_rows,
    pick_fold,
)
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.gradient_fold.outer_triton import (
    fold_descriptors,
    gradient_part,
    launch_blocks,
    load_part,
    outer_descriptor_tile,
    store_part,
    tile_of,
)
from rl_consistency.kernels.gradient_fold.schedules import FoldSchedule
from rl_consistency.kernels.reduction.tree_fold_triton import matrix_step


class SequenceBlocks(NamedTuple):
    """The rows of a layout's sequences in their order, in blocks of one sequence each."""

    rows: Tensor
    """[blocks * n] int32, -1 after a sequence's last row."""
    first: Tensor
    """[blocks] int64, the first block of the block's sequence."""
    sequence: Tensor
    """[blocks] int64."""
    last: Tensor
    """[S] int64, the last block of each sequence that has rows."""


def sequence_blocks(layout: AttentionLayout, device: torch.device, size: int) -> SequenceBlocks:
    """The blocks of `size` rows of a layout, made once; ValueError if sequences share rows."""
    return layout.kept(
        ("sequence_blocks", device, size), lambda: _sequence_blocks(layout, device, size)
    )


def _sequence_blocks(layout: AttentionLayout, device: torch.device, size: int) -> SequenceBlocks:
    spans = [
        (start, length)
        for start, length in zip(layout.query_starts, layout.query_lens, strict=True)
        if length
    ]
    starts, lens = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    order = starts.argsort()
    if bool(((starts + lens)[order][:-1] > starts[order][1:]).any()):
        raise ValueError("experts: sequences of the layout share rows; a row has one sequence.")
    counts = -(-lens // size)
    after = counts.cumsum(0)
    sequence = torch.repeat_interleave(counts)
    first = (after - counts)[sequence]
    within = (torch.arange(len(sequence)) - first)[:, None] * size + torch.arange(size)
    rows = (starts[sequence][:, None] + within).masked_fill(within >= lens[sequence][:, None], -1)
    # One copy for all.
    numbers = torch.cat([rows.flatten(), first, sequence, after - 1])
    sizes = [rows.numel(), len(first), len(sequence), len(after)]
    moved = from_host(numbers, device).split(sizes)
    return SequenceBlocks(moved[0].to(torch.int32), *moved[1:])


def most_steps(layout: AttentionLayout, top_k: int, experts: int) -> int:
    """Bound of the entries of a table of steps: a run is filled by up to 15, and an expert's runs
    by up to `BLOCK_STEPS` - 16."""
    pairs = [n * top_k for n in layout.query_lens]
    filled = sum(n + (STEP - 1) * min(experts, n) for n in pairs)
    return filled + (BLOCK_STEPS - STEP) * min(experts, sum(pairs))


@triton.jit
def _block(rows_ptr, ids_ptr, E, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    members, _ = members_of(row, ids_ptr, E, TOP_K, ROWS, BLOCK_E)
    return row, members


@remembered
@triton.jit
def count_runs_kernel(
    rows_ptr, ids_ptr, counts_ptr, E,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """How many rows of each expert a block has."""
    _, members = _block(rows_ptr, ids_ptr, E, TOP_K, ROWS, BLOCK_E)
    expert = tl.arange(0, BLOCK_E)
    at = tl.program_id(0) * E + expert
    tl.store(counts_ptr + at, tl.sum(members, axis=0), mask=expert < E)


@remembered
@triton.jit
def place_runs_kernel(
    rows_ptr, ids_ptr, places_ptr, base_ptr, step_places_ptr, step_rows_ptr, E,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store a block's pairs in the tables of steps, from its base for each expert on."""
    row, members = _block(rows_ptr, ids_ptr, E, TOP_K, ROWS, BLOCK_E)
    expert = tl.arange(0, BLOCK_E)
    base = tl.load(base_ptr + tl.program_id(0) * E + expert, mask=expert < E, other=0)
    step = base[None, :] + tl.cumsum(members, axis=0) - members
    slot = tl.cumsum(members, axis=1) - members
    own = tl.broadcast_to(row[:, None], (ROWS, BLOCK_E))
    place = tl.load(places_ptr + own * TOP_K + slot, mask=members > 0, other=-1)
    tl.store(step_places_ptr + step, place, mask=members > 0)
    tl.store(step_rows_ptr + step, own, mask=members > 0)


class Runs(NamedTuple):
    """The tables of steps of a call, in runs that start a step; -1 for filler."""

    places: Tensor
    """[n] int32, where the pairs stand."""
    rows: Tensor
    """[n] int32, their rows."""
    first: Tensor
    """[E + 1] int32, where each expert's runs begin; multiples of `BLOCK_STEPS`."""


def find_runs(expert_ids: Tensor, places: Tensor, layout: AttentionLayout, experts: int) -> Runs:
    """The runs of expert_ids [R, k], whose pairs stand at `places` [R, k]."""
    size = block_rows(experts)
    blocks = sequence_blocks(layout, expert_ids.device, size)
    steps = most_steps(layout, expert_ids.shape[1], experts)
    step_places, step_rows = expert_ids.new_full((2, steps), -1)
    count = len(blocks.sequence)
    if count == 0:
        return Runs(step_places, step_rows, expert_ids.new_zeros(experts + 1))
    expert_ids = expert_ids.contiguous()
    constants = {
        "TOP_K": expert_ids.shape[1],
        "ROWS": size,
        "BLOCK_E": block_experts(experts),
        "num_warps": 8,
    }
    counts = expert_ids.new_empty((count, experts))
    count_runs_kernel[(count,)](blocks.rows, expert_ids, counts, experts, **constants)
    after = counts.cumsum(0)
    before = after - counts
    in_run = before - before[blocks.first]  # [blocks, E] rows of the same run in earlier blocks
    run = after[blocks.last] - before[blocks.first[blocks.last]]  # [S, E] rows of each run
    filled = -(-run // STEP) * STEP
    ends = filled.cumsum(0)  # within the expert's part
    first = F.pad((-(-ends[-1] // BLOCK_STEPS) * BLOCK_STEPS).cumsum(0), (1, 0))
    starts = first[:-1] + ends - filled
    base = (starts[blocks.sequence] + in_run).to(torch.int32).contiguous()
    place_runs_kernel[(count,)](
        blocks.rows, expert_ids, places, base, step_places, step_rows, experts, **constants
    )
    return Runs(step_places, step_rows, first.to(torch.int32))


@remembered
@triton.jit
def fold_runs_tma_kernel(
    dy_desc, x_desc, extra_desc, g_ptr, first_ptr, E, N, K, stride_ge, stride_gn, stride_gk,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTRA_N: tl.constexpr,
    EXTRA_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Tiles of the gradients, those of one expert after another."""
    tiles = tl.cdiv(N, BLOCK_N + EXTRA_N) * tl.cdiv(K, BLOCK_K + EXTRA_K)
    if PERSISTENT:
        for index in range(tl.program_id(0), E * tiles, tl.num_programs(0)):
            _expert_tile(
                index, tiles, dy_desc, x_desc, extra_desc, g_ptr, first_ptr, N, K, stride_ge,
                stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, GROUP,
            )  # fmt: skip
    else:
        _expert_tile(
            tl.program_id(0), tiles, dy_desc, x_desc, extra_desc, g_ptr, first_ptr, N, K, stride_ge,
            stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, GROUP,
        )  # fmt: skip


@triton.jit
def _expert_tile(
    index, tiles, dy_desc, x_desc, extra_desc, g_ptr, first_ptr, N, K, stride_ge, stride_gn,
    stride_gk, FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EXTRA_N: tl.constexpr, EXTRA_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert = index // tiles
    begin, end = tl.load(first_ptr + expert), tl.load(first_ptr + expert + 1)
    # An expert without rows keeps its gradient, -0 too.
    if FRESH or begin < end:
        outer_descriptor_tile(
            index % tiles, dy_desc, x_desc, extra_desc, g_ptr + expert.to(tl.int64) * stride_ge,
            begin, end, N, K, stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K,
            BLOCK_T, GROUP,
        )  # fmt: skip


@remembered
@triton.jit
def fold_runs_kernel(
    dy_ptr, x_ptr, g_ptr, dy_steps_ptr, x_steps_ptr, first_ptr, N, K, stride_dy, stride_x,
    stride_ge, stride_gn, stride_gk, tiles,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's gradient, over all steps of its runs."""
    expert = tl.program_id(0) // tiles
    tile_n, tile_k = tile_of(tl.program_id(0) % tiles, N, K, BLOCK_N, BLOCK_K, GROUP)
    first_n, first_k = tile_n * BLOCK_N, tile_k * BLOCK_K
    begin = tl.load(first_ptr + expert)
    end = tl.load(first_ptr + expert + 1)
    g_ptr += expert.to(tl.int64) * stride_ge
    if begin < end:
        acc = load_part(
            g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K
        )
        if dy_ptr.dtype.element_ty == tl.float32:
            acc = acc.to(tl.float64)
        n = first_n + tl.arange(0, BLOCK_N)
        k = first_k + tl.arange(0, BLOCK_K)
        for start in range(begin, end, BLOCK_T):
            step = start + tl.arange(0, BLOCK_T)
            dy_at = tl.load(dy_steps_ptr + step, mask=step < end, other=-1).to(tl.int64)
            x_at = tl.load(x_steps_ptr + step, mask=step < end, other=-1).to(tl.int64)
            dy = tl.load(  # [BLOCK_T, BLOCK_N]
                dy_ptr + dy_at[:, None] * stride_dy + n[None, :],
                mask=(dy_at >= 0)[:, None] & (n < N)[None, :], other=0.0,
            )  # fmt: skip
            x = tl.load(  # [BLOCK_T, BLOCK_K]
                x_ptr + x_at[:, None] * stride_x + k[None, :],
                mask=(x_at >= 0)[:, None] & (k < K)[None, :], other=0.0,
            )  # fmt: skip
            acc = matrix_step(dy.T, x, acc)
        store_part(acc, g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K, 0)
    elif FRESH:
        pointers, inside = gradient_part(
            g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K
        )
        zeros = tl.zeros((BLOCK_N, BLOCK_K), g_ptr.dtype.element_ty)
        tl.store(pointers, zeros, mask=inside)


def describes_rows(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether descriptors can address copies of operands of these widths."""
    return has_tma(device) and not any(w * dtype.itemsize % DESCRIPTOR_BYTES for w in widths)


def fold_runs(
    buffer: Tensor, dy: Tensor, x: Tensor, places: Tensor, rows: Tensor, first: Tensor,
    dy_by_row: bool, fresh: bool, schedule: FoldSchedule | None = None,
) -> None:  # fmt: skip
    """Continue `buffer` [E, N, K] over the runs, whose tables are `Runs`.

    One of dy [*, N] and x [*, K] has a row for each row of the call, the other one for each pair;
    `dy_by_row` says that it is dy. An expert without runs is left as it is; a `fresh` buffer counts
    as all zero.
    """
    if not len(rows):
        if fresh:
            buffer.zero_()
        return
    experts, n, k = buffer.shape
    tma = describes_rows(buffer.device, dy.dtype, n, k)
    if schedule is None:
        pairs = len(x if dy_by_row else dy)
        schedule = pick_fold(
            pairs, experts, n, k, dy.dtype, tma=tma, processors=sm_count(buffer.device),
            device=buffer.device,
        )  # fmt: skip
    dy_steps, x_steps = (rows, places) if dy_by_row else (places, rows)
    programs, strides = experts * schedule.tiles(n, k), buffer.stride()
    blocks = {"FRESH": fresh, **launch_blocks(schedule)}
    if schedule.kind == "pointer":
        dy, x = dense_rows(dy), dense_rows(x)
        fold_runs_kernel[(programs,)](
            dy, x, buffer, dy_steps, x_steps, first, n, k, dy.stride(0), x.stride(0), *strides,
            schedule.tiles(n, k), **blocks,
        )  # fmt: skip
        return
    if not tma:
        raise ValueError(
            f"experts: schedule {schedule.name} copies by descriptor, which needs rows of whole "
            f"{DESCRIPTOR_BYTES} bytes; the gradient is {tuple(buffer.shape)} of {dy.dtype} "
            "operands. Use a pointer schedule."
        )
    if schedule.persistent:
        programs = min(programs, sm_count(buffer.device) * schedule.resident)
    dy, x = gather_rows(dy, dy_steps, first, 1), gather_rows(x, x_steps, first, 1)
    fold_runs_tma_kernel[(programs,)](
        *fold_descriptors(dy, x, schedule), buffer, first, experts, n, k, *strides,
        EXTRA_N=schedule.extra_n, EXTRA_K=schedule.extra_k, PERSISTENT=schedule.persistent,
        **blocks,
    )  # fmt: skip


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def expert_fold_op(
    buffer: Tensor, dy: Tensor, x: Tensor, places: Tensor, rows: Tensor, first: Tensor,
    dy_by_row: bool, fresh: bool,
) -> None:  # fmt: skip
    """`fold_runs` as a compiler sees it: one opaque call."""
    fold_runs(buffer, dy, x, places, rows, first, dy_by_row, fresh)
