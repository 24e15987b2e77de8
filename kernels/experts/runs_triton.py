"""The runs that the gradients of expert weights are folded over, found on the device.

A run is the rows of one sequence at one expert, by position. Tables of steps list the rows and the
pairs of every run, filled up to a multiple of 16 with -1, the runs of an expert in the order of the
sequences. Each expert's part of a table is filled up to a multiple of `BLOCK_STEPS`, so that a
block of steps never has two experts.

Shapes: expert_ids and places [R, k] -> tables of at most `most_steps` entries, int32.
Dtypes and rounding points, order: none; counts are exact.
Errors: ValueError on sequences that share rows.
Cost: two launches and some sums of counts; nothing waits for the host.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout, from_host
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.experts.pairs_triton import members_of
from rl_consistency.kernels.experts.schedules import BLOCK_STEPS, block_experts, block_rows
from rl_consistency.kernels.gradient_fold.op import STEP


@dataclass(frozen=True, eq=False)
class SequenceBlocks:
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


@dataclass(frozen=True, eq=False)
class Runs:
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
