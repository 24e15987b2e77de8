"""The gradient fold of embedding rows in Triton: row index[t] += rows[t], t upward.

Shapes, dtypes, order, invariance: those of `gradient_fold`.
Errors: none; a token whose index is outside the table is skipped, as with -1.
Cost: memory-bound. A row of the table is read and written once, a row of gradients read once.

Tokens are first sorted by id; the tokens of one id keep their order and form a run. Most runs are
short, but a few hold a large share of the tokens. So there are two kinds of programs. A wide
program adds several runs of up to GAP tokens at once, one token of each per turn. A narrow program
adds one longer run, with many tokens in flight. It stands at every GAP-th position, a mark: a
longer run contains a mark, and the program at its first mark adds it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.device import dense_rows
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.core.torch_op import kernel_op

RANKED_TOKENS = 16384
"""Up to this many tokens, comparing each with all others is faster than sorting."""


@dataclass(frozen=True)
class RowFoldSchedule:
    """How programs share the runs; it changes no bit."""

    gap: int = 32
    """Positions from mark to mark, and the longest run of a wide program; a power of two."""
    runs: int = 4
    """Positions of a wide program; a power of two."""
    block: int = 1024
    """Columns of a wide program."""
    batch: int = 32
    """Tokens that a narrow program loads at once."""
    narrow: int = 256
    """Columns of a narrow program."""
    warps: int = 4


CANDIDATES = (
    RowFoldSchedule(),
    RowFoldSchedule(narrow=512),
    RowFoldSchedule(batch=16, narrow=512),
    RowFoldSchedule(runs=2),
    RowFoldSchedule(runs=8),
    RowFoldSchedule(gap=16, narrow=512),
    RowFoldSchedule(runs=8, block=512),
)
"""Schedules to time and to compare; the fold runs `RowFoldSchedule()`."""


@triton.jit
def _known_ids(index_ptr, token, T, V):
    """int32 ids of tokens; V for an index outside the table or a token past the last."""
    row_id = tl.load(index_ptr + token, mask=token < T, other=-1)
    return tl.where((row_id >= 0) & (row_id < V), row_id, V).to(tl.int32)


@triton.jit
def _minus_smaller(index_ptr, other, bound, T, V):
    """-1 where the id of a token in `other` is below `bound`; else 0."""
    return (_known_ids(index_ptr, other, T, V)[None, :] - bound) >> 31


@remembered
@triton.jit
def _rank_kernel(index_ptr, id_ptr, token_ptr, T, V, BLOCK_T: tl.constexpr, BLOCK_U: tl.constexpr):
    """Store BLOCK_T tokens at their places in the sort by id, then by token."""
    first = tl.program_id(0) * BLOCK_T
    token = first + tl.arange(0, BLOCK_T)
    row_id = _known_ids(index_ptr, token, T, V)
    bound = row_id[:, None]
    lane = tl.arange(0, BLOCK_U)
    own = first // BLOCK_U * BLOCK_U
    earlier = ((own + lane)[None, :] < token[:, None]).to(tl.int32)
    count = _minus_smaller(index_ptr, own + lane, bound + earlier, T, V)  # [BLOCK_T, BLOCK_U]
    for start in range(0, own, BLOCK_U):
        count += _minus_smaller(index_ptr, start + lane, bound + 1, T, V)
    for start in range(own + BLOCK_U, T, BLOCK_U):
        count += _minus_smaller(index_ptr, start + lane, bound, T, V)
    position = -tl.sum(count, axis=1)
    tl.store(id_ptr + position, row_id, mask=token < T)
    tl.store(token_ptr + position, token, mask=token < T)


@triton.jit
def _next_tokens(id_ptr, token_ptr, start, row_id, T, BATCH: tl.constexpr):
    """How many of the next BATCH positions belong to the run, and their tokens."""
    position = start + tl.arange(0, BATCH)
    same = tl.load(id_ptr + position, mask=position < T, other=-1) == row_id
    tokens = ()
    for i in tl.static_range(BATCH):
        token = tl.load(token_ptr + start + i, mask=start + i < T, other=0)
        tokens = tokens + (token.to(tl.int64),)
    return tl.sum(same.to(tl.int32), axis=0), tokens


@triton.jit
def _fold_run(rows_ptr, buffer_ptr, id_ptr, token_ptr, start, row_id, columns, T, C, stride_row,
              stride_v, stride_c, BATCH: tl.constexpr):  # fmt: skip
    """Add one run of any length, from position `start`."""
    inside = columns < C
    pointers = buffer_ptr + row_id.to(tl.int64) * stride_v + columns.to(tl.int64) * stride_c
    count, tokens = _next_tokens(id_ptr, token_ptr, start, row_id, T, BATCH)
    acc = tl.load(pointers, mask=inside, other=0.0)
    while count > 0:
        rows = ()
        for i in tl.static_range(BATCH):
            # Adding -0 changes no value, not even -0.
            row = tl.load(
                rows_ptr + tokens[i] * stride_row + columns, mask=inside & (i < count), other=-0.0
            )
            rows = rows + (row,)
        start += BATCH
        # Loaded before the additions, so that the next turn does not wait for them.
        count, tokens = _next_tokens(id_ptr, token_ptr, start, row_id, T, BATCH)
        for i in tl.static_range(BATCH):
            acc += rows[i].to(acc.dtype)
    tl.store(pointers, acc, mask=inside)


@triton.jit
def _fold_short_runs(rows_ptr, buffer_ptr, id_ptr, token_ptr, first, columns, T, V, C, stride_row,
                     stride_v, stride_c, GAP: tl.constexpr, RUNS: tl.constexpr):  # fmt: skip
    """Add the runs of up to GAP tokens that begin at one of RUNS positions."""
    position = first + tl.arange(0, RUNS)
    row_id = tl.load(id_ptr + position, mask=position < T, other=-1)
    previous = tl.load(id_ptr + position - 1, mask=(position > 0) & (position <= T), other=-1)
    beyond = tl.load(id_ptr + position + GAP, mask=position + GAP < T, other=-1)
    token = tl.load(token_ptr + position, mask=position < T, other=0)
    going = (row_id != previous) & (row_id != beyond) & (row_id >= 0) & (row_id < V)
    inside = going[:, None] & (columns < C)[None, :]  # [RUNS, BLOCK_C]
    row_offset = tl.where(going, row_id, 0).to(tl.int64)[:, None] * stride_v
    pointers = buffer_ptr + row_offset + columns.to(tl.int64)[None, :] * stride_c
    acc = tl.load(pointers, mask=inside, other=0.0)
    left = tl.sum(going.to(tl.int32), axis=0)
    while left > 0:
        row = tl.load(
            rows_ptr + token.to(tl.int64)[:, None] * stride_row + columns[None, :],
            mask=going[:, None] & (columns < C)[None, :],
            other=-0.0,
        )
        position += 1
        going &= tl.load(id_ptr + position, mask=position < T, other=-1) == row_id
        token = tl.load(token_ptr + position, mask=position < T, other=0)
        left = tl.sum(going.to(tl.int32), axis=0)
        acc += row.to(acc.dtype)
    tl.store(pointers, acc, mask=inside)


@remembered
@triton.jit
def _fold_rows_kernel(
    rows_ptr, buffer_ptr, id_ptr, token_ptr, T, V, C, stride_row, stride_v, stride_c,
    narrow_programs,
    GAP: tl.constexpr, BATCH: tl.constexpr, NARROW_C: tl.constexpr, RUNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The narrow programs come first, since the longest runs take longest."""
    program = tl.program_id(0)
    if program < narrow_programs:
        blocks = tl.cdiv(C, NARROW_C)
        mark = program // blocks * GAP
        row_id = tl.load(id_ptr + mark)
        before = mark - GAP + tl.arange(0, GAP)
        same = tl.load(id_ptr + before, mask=before >= 0, other=-1) == row_id
        count = tl.sum(same.to(tl.int32), axis=0)
        start = mark - count
        beyond = tl.load(id_ptr + start + GAP, mask=start + GAP < T, other=-1)
        if (count < GAP) & (row_id == beyond) & (row_id >= 0) & (row_id < V):
            some = program % blocks * NARROW_C + tl.arange(0, NARROW_C)
            _fold_run(
                rows_ptr, buffer_ptr, id_ptr, token_ptr, start, row_id, some, T, C, stride_row,
                stride_v, stride_c, BATCH,
            )  # fmt: skip
    else:
        blocks = tl.cdiv(C, BLOCK_C)
        program -= narrow_programs
        columns = program % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
        _fold_short_runs(
            rows_ptr, buffer_ptr, id_ptr, token_ptr, program // blocks * RUNS, columns, T, V, C,
            stride_row, stride_v, stride_c, GAP, RUNS,
        )  # fmt: skip


def ordered_tokens(index: Tensor, num_rows: int, *, ranked: bool) -> tuple[Tensor, Tensor]:
    """Tokens sorted by id, then by token: (ids int32, tokens), both [T].

    An id outside the table counts as `num_rows`. `ranked` counts the predecessors of each token (T
    squared comparisons); otherwise a stable sort runs.
    """
    if not ranked:
        known = index.masked_fill((index < 0) | (index >= num_rows), num_rows)
        # 32-bit keys halve the passes of the sort.
        ids, tokens = torch.sort(known.to(torch.int32), stable=True)
        return ids, tokens
    count = index.shape[0]
    ids, tokens = (index.new_empty((count,), dtype=torch.int32) for _ in range(2))
    _rank_kernel[(cdiv(count, 16),)](
        index.contiguous(), ids, tokens, count, num_rows, BLOCK_T=16, BLOCK_U=512, num_warps=4
    )
    return ids, tokens


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def gradient_fold_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """`fold_rows` on CUDA."""
    if min(*rows.shape) == 0:
        return
    ranked = index.shape[0] <= RANKED_TOKENS
    launch_rows(buffer, index, rows, RowFoldSchedule(), ranked=ranked)


def launch_rows(
    buffer: Tensor, index: Tensor, rows: Tensor, schedule: RowFoldSchedule, *, ranked: bool
) -> None:
    """Run one schedule; T > 0 and C > 0."""
    rows = dense_rows(rows)
    count, columns = rows.shape
    ids, tokens = ordered_tokens(index, buffer.shape[0], ranked=ranked)
    block = min(next_power_of_2(columns), schedule.block)
    narrow = min(next_power_of_2(columns), schedule.narrow)
    marks = cdiv(count, schedule.gap) * cdiv(columns, narrow)
    programs = marks + cdiv(count, schedule.runs) * cdiv(columns, block)
    _fold_rows_kernel[(programs,)](
        rows, buffer, ids, tokens, count, buffer.shape[0], columns, rows.stride(0),
        *buffer.stride(), marks, GAP=schedule.gap, BATCH=schedule.batch, NARROW_C=narrow,
        RUNS=schedule.runs, BLOCK_C=block, num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
