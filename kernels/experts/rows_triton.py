"""Kernels of pairs and rows on CUDA: the sum of a row's pairs, and what lies between a pair's
products.

Shapes: outputs [R * k, H], places and weights [R, k] -> [R, H]. `pair_bwd`: gate and up
    [R * k, 2I], u [R * k, I] -> their gradients, the weighted activation [R * k, I], and dweights
    [R, k].
Dtypes and rounding points, order: those of `experts`.
Invariant to: the other rows and pairs, every field of a schedule.
Errors: none. A row with impossible ids gives NaN, one that no sequence owns zeros.
Cost: memory-bound.
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
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.pairs_triton import REFUSED
from rl_consistency.kernels.experts.schedules import RowSchedule, pick_combine, pick_pair
from rl_consistency.kernels.glu.activation_triton import (
    ACTIVATIONS,
    activate_with_derivative,
    glu_value,
)
from rl_consistency.kernels.reduction.tree_fold_triton import halve_across


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
    x_ptr, first_ptr, pairs_ptr, y_ptr, H, E, stride_x, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some columns of the row of one pair."""
    place = tl.program_id(0)
    if place < tl.load(first_ptr + E):
        row = (tl.load(pairs_ptr + place) // TOP_K).to(tl.int64)
        column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row * stride_x + column, mask=column < H, other=0.0)
        tl.store(y_ptr + place.to(tl.int64) * H + column, x, mask=column < H)


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


def combine_fwd(
    outputs: Tensor, places: Tensor, weights: Tensor | None, schedule: RowSchedule | None = None
) -> Tensor:
    """[R, H]: each row's pairs of outputs [R * k, H], times their weights if there are any."""
    (rows, top_k), hidden = places.shape, outputs.shape[1]
    y = outputs.new_empty((rows, hidden))
    weights = None if weights is None else weights.contiguous()
    schedule = schedule or pick_combine(rows, hidden)
    block, overlap = min(schedule.block, next_power_of_2(hidden)), has_tma(y.device)
    combine_kernel[(rows, cdiv(hidden, block))](
        outputs, places, weights, y, rows, hidden, TOP_K=top_k, WEIGHTED=weights is not None,
        BLOCK_H=block, OVERLAP=overlap, launch_pdl=overlap, num_warps=schedule.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return y


def gather_pairs(
    x: Tensor, first: Tensor, pairs: Tensor, top_k: int, schedule: RowSchedule | None = None
) -> Tensor:
    """[R * k, H]: the row of each pair of x [R, H]; rows past the last pair hold anything."""
    x = dense_rows(x)
    hidden = x.shape[1]
    y = x.new_empty((len(pairs), hidden))
    schedule = schedule or pick_combine(len(pairs), hidden)
    block = min(schedule.block, next_power_of_2(hidden))
    gather_kernel[(len(pairs), cdiv(hidden, block))](
        x, first, pairs, y, hidden, len(first) - 1, x.stride(0), TOP_K=top_k, BLOCK_H=block,
        num_warps=schedule.warps,
    )  # fmt: skip
    return y


def activate_pairs(
    packed: Tensor, first: Tensor, activation: str, schedule: RowSchedule | None = None
) -> Tensor:
    """[R * k, I]: the gated activation of gate and up [R * k, 2I]; `first` as in `pair_bwd`."""
    width = packed.shape[1] // 2
    y = packed.new_empty((len(packed), width))
    schedule = schedule or pick_combine(len(packed), width)
    block = min(schedule.block, next_power_of_2(width))
    activate_kernel[(len(packed), cdiv(width, block))](
        packed, first, y, width, len(first) - 1, ACTIVATION=ACTIVATIONS.index(activation),
        BLOCK_N=block, num_warps=schedule.warps, enable_fp_fusion=False,
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


@kernel_op(
    fake=lambda outputs, places, weights: outputs.new_empty((places.shape[0], outputs.shape[1]))
)
def expert_combine_op(outputs: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """`combine_fwd` as a compiler sees it: one opaque call."""
    return combine_fwd(outputs, places, weights)


@kernel_op(
    fake=lambda packed, u, weights, *_: (
        torch.empty_like(packed),
        torch.empty_like(u),
        torch.empty_like(weights),
    )
)
def expert_pair_bwd_op(
    packed: Tensor, u: Tensor, weights: Tensor, first: Tensor, pairs: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`pair_bwd` as a compiler sees it: one opaque call."""
    return pair_bwd(packed, u, weights, first, pairs, activation)
