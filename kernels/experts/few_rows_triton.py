"""The experts of few rows on CUDA: two launches, one of gate and up and one of everything after.

No pairs are found: a program takes the experts of its row from the row's ids.

Shapes: x [R, H], expert_ids [R, k] int32, weights [R, k] fp32, gate_up [E, 2I, H], down [E, H, I],
    sequences as `starts` and `lens` [S] -> [R, H].
Dtypes and rounding points: bf16 and fp16, with the rounding points of `experts`.
Order: that of `experts`.
Invariant to: the other rows, the schedule.
Varies with: H, I; operand dtype.
Backward: none; nothing is kept for it.
Errors: ValueError on fp32 and on more than `MOST_TOP_K` experts a row. A row with impossible ids
    gives NaN, one that no sequence owns zeros.
Cost: the weights of each row's experts, once for each row; what rows share is read again, mostly
    from the L2 cache.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma, shared_memory
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.core.matrix_step import matrix_step, no_steps
from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.core.prefetch import prefetch_lines, prefetched_columns
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.pairs_triton import SEQUENCES, owned_rows
from rl_consistency.kernels.experts.products_triton import gate_up_tile
from rl_consistency.kernels.experts.schedules import FEW, MOST_TOP_K, FewSchedule, pick_few
from rl_consistency.kernels.glu.activation_triton import ACTIVATIONS

NO_EXPERTS = tl.constexpr(0)
"""State of a row that no sequence owns."""
IMPOSSIBLE = tl.constexpr(1)
"""State of a row whose ids are not ascending or are no experts'."""
ROUTED = tl.constexpr(2)
"""State of a row with experts."""


@triton.jit
def row_state(
    ids_ptr, start_ptr, len_ptr, row, R, S, E,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Whether a row has experts, and why not."""
    slot = tl.arange(0, SLOTS)
    ids = ids_ptr + row.to(tl.int64) * TOP_K + slot
    own = tl.load(ids, mask=slot < TOP_K, other=0)
    previous = tl.load(ids - 1, mask=(slot > 0) & (slot < TOP_K), other=-1)
    wrong = (slot < TOP_K) & ((own <= previous) | (own >= E))
    fits = ROUTED - tl.max(wrong.to(tl.int32), axis=0) * (ROUTED - IMPOSSIBLE)
    owned = tl.max(owned_rows(row, start_ptr, len_ptr, R, S, 1, SEQUENCES), axis=0) >= 0
    return tl.where(owned, fits, NO_EXPERTS)


@remembered
@triton.jit(do_not_specialize=["R", "S"])
def few_gate_up_kernel(
    x_ptr, w_ptr, y_ptr, ids_ptr, start_ptr, len_ptr, R, S, N, K, E,
    stride_x, stride_we, stride_wn, stride_wk,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SEQUENCES: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some columns of the gated activation of one row at one of its experts."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    # Rows are neighbours: where they share an expert, its weights come from the L2 cache.
    row = tl.program_id(0) % R
    slot_tile = tl.program_id(0) // R
    pair = row * TOP_K + slot_tile % TOP_K
    state = row_state(ids_ptr, start_ptr, len_ptr, row, R, S, E, TOP_K, SLOTS, SEQUENCES)
    if state == ROUTED:
        expert = tl.load(ids_ptr + pair)
        rows = tl.broadcast_to(row.to(tl.int64), (BLOCK_M,))
        gate_up_tile(
            x_ptr, w_ptr, None, y_ptr, y_ptr, rows, expert, pair, pair + 1,
            slot_tile // TOP_K, N, K, stride_x, stride_we, stride_wn, stride_wk,
            ACTIVATION, False, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


@triton.jit
def chosen_of(x, chosen):
    """Of each column of x [M, N] fp32 the one element that is chosen. They are added as bits, since
    0 + -0 is 0."""
    bits = tl.where(chosen, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@remembered
@triton.jit(do_not_specialize=["R", "S"])
def few_down_kernel(
    h_ptr, w_ptr, y_ptr, ids_ptr, weights_ptr, start_ptr, len_ptr, R, S, N, K, E,
    stride_we, stride_wn, stride_wk,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCHED: tl.constexpr,
):  # fmt: skip
    """Some columns of one row: the products of its experts, times their weights, by ascending
    expert.

    One matrix holds BLOCK_N columns of every expert. The rows of the other operand are those of the
    experts, so each result is where an expert's row meets its own columns.
    """
    row, tile_n = tl.program_id(0) % R, tl.program_id(0) // R
    at = tl.arange(0, SLOTS * BLOCK_N)
    slot = at // BLOCK_N
    column = (tile_n * BLOCK_N + at % BLOCK_N).to(tl.int64)
    known = slot < TOP_K
    inside = known & (column < N)
    if OVERLAP:
        # The ids were written before `few_gate_up_kernel` let this kernel start. Wrong ones would
        # ask for other lines and change nothing else. Slots without an expert ask for the last's.
        own_slot = tl.minimum(slot, TOP_K - 1)
        guess = tl.load(ids_ptr + row * TOP_K + own_slot, cache_modifier=".cg")
        guess = tl.minimum(tl.maximum(guess, 0), E - 1).to(tl.int64)
        LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
        step = tl.minimum(tl.arange(0, PREFETCHED // LINE) * LINE, K - 1)
        first = guess * stride_we + tl.minimum(column, N - 1) * stride_wn
        prefetch_lines(w_ptr + first[:, None] + (step * stride_wk)[None, :])
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    state = row_state(ids_ptr, start_ptr, len_ptr, row, R, S, E, TOP_K, SLOTS, SEQUENCES)
    total = tl.zeros((BLOCK_N,), tl.float32)
    if state == ROUTED:
        expert = tl.load(ids_ptr + row * TOP_K + slot, mask=known, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + row * TOP_K + slot, mask=known, other=0.0)
        place = tl.arange(0, BLOCK_M)
        h_ptrs = h_ptr + (row * TOP_K + place).to(tl.int64)[:, None] * K
        w_ptrs = w_ptr + (expert * stride_we + column * stride_wn)[None, :]
        acc = no_steps(BLOCK_M, SLOTS * BLOCK_N, h_ptr.dtype.element_ty)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            steps = k + tl.arange(0, BLOCK_K)
            within = steps < K
            h_mask = (place < TOP_K)[:, None] & within[None, :]
            h = tl.load(h_ptrs + steps[None, :], mask=h_mask, other=0.0)
            w = tl.load(
                w_ptrs + steps.to(tl.int64)[:, None] * stride_wk,
                mask=within[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            acc = matrix_step(h, w, acc)
        own = chosen_of(acc.to(tl.float32), place[:, None] == slot[None, :])
        own = own.to(h_ptr.dtype.element_ty).to(tl.float32)
        parts = tl.reshape(weight * own, (SLOTS, BLOCK_N))
        each = tl.arange(0, SLOTS)[:, None]
        for other in tl.static_range(TOP_K):
            part = chosen_of(parts, each == other)
            total = part if other == 0 else total + part
    if state == IMPOSSIBLE:
        total = tl.full((BLOCK_N,), float("nan"), tl.float32)
    to = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + row.to(tl.int64) * N + to, total.to(y_ptr.dtype.element_ty), mask=to < N)


def few_rows_fwd(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    starts: Tensor,
    lens: Tensor,
    activation: str,
    schedule: FewSchedule | None = None,
) -> Tensor:
    """[R, H] from x [R, H]; arguments are those of `experts`, with its layout as `starts` and
    `lens` [S]. `schedule` changes no bit."""
    x, expert_ids, weights = dense_rows(x), expert_ids.contiguous(), weights.contiguous()
    (rows, hidden), top_k = x.shape, expert_ids.shape[1]
    experts, _, width = down.shape
    if x.dtype == torch.float32 or top_k > MOST_TOP_K:
        raise ValueError(
            f"experts: {x.dtype} and {top_k} experts a row; kernels of few rows take bf16 and fp16 "
            f"and at most {MOST_TOP_K}. Find the pairs first, as `experts` does."
        )
    slots = next_power_of_2(top_k)
    if schedule is None:
        schedule = pick_few(rows, top_k, experts, hidden, width, x.dtype, x.device)
    if schedule is None:
        schedule = FEW[0].fitted(rows * top_k, slots, hidden, width)
    schedule = schedule.within(shared_memory(x.device))
    activated, y = x.new_empty((rows * top_k, width)), x.new_empty((rows, hidden))
    overlap, sizes = has_tma(x.device), (rows, starts.shape[0])
    shared = {
        "TOP_K": top_k,
        "SLOTS": slots,
        "SEQUENCES": SEQUENCES,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "enable_fp_fusion": False,
    }
    tile = schedule.gate_up
    few_gate_up_kernel[(rows * top_k * cdiv(width, tile.block_n),)](
        x, gate_up, activated, expert_ids, starts, lens, *sizes, width, hidden, experts,
        x.stride(0), *gate_up.stride(), ACTIVATION=ACTIVATIONS.index(activation),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.stages,
        num_warps=tile.warps, **shared,
    )  # fmt: skip
    tile = schedule.down
    columns = tile.block_n // slots
    few_down_kernel[(rows * cdiv(hidden, columns),)](
        activated, down, y, expert_ids, weights, starts, lens, *sizes, hidden, width, experts,
        *down.stride(), BLOCK_M=tile.block_m, BLOCK_N=columns, BLOCK_K=tile.block_k,
        STAGES=tile.stages, num_warps=tile.warps,
        PREFETCHED=prefetched_columns(tile.block_n, width, x.element_size()), **shared,
    )  # fmt: skip
    return y


@kernel_op(fake=lambda x, *_: x.new_empty(x.shape))
def expert_few_rows_op(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    starts: Tensor,
    lens: Tensor,
    activation: str,
) -> Tensor:
    """`few_rows_fwd` as a compiler sees it: one opaque call."""
    return few_rows_fwd(x, expert_ids, weights, gate_up, down, starts, lens, activation)
