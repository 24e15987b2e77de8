"""Fused products for few rows: q, k and v in one launch; gate, up and GLU in one launch.

Shapes: `qkv_fwd`: x [M, K], three weights [N_i, K], three biases [N_i] or None -> three [M, N_i].
    `gate_up_glu_fwd`: x [M, K], two weights [N, K] -> [M, N].
Dtypes and rounding points: those of the separate ops: each product is rounded to the dtype of x;
    the gated activation is computed in fp32 and rounded once.
Order: `matmul.ORDER` for each product, `glu.ORDER` for the activation.
Invariant to, varies with: as `matmul`; fused and separate ops give the same bytes.
Errors: none; `linear.op` checks, and refuses calls that want a gradient.
Cost: one launch instead of three; each weight is read once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import dense_rows, has_tma, takes_descriptors
from rl_consistency.kernels.core.launch import cdiv, remembered, tile_descriptor
from rl_consistency.kernels.core.prefetch import prefetch_rows, prefetched_columns
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.linear.schedules import pick_gate_up, pick_qkv
from rl_consistency.kernels.matmul.product_triton import (
    SHARED_BYTES,
    launch_options,
    pointer_tile,
    tile_position,
)
from rl_consistency.kernels.matmul.schedules import Schedule
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu_tile
from rl_consistency.kernels.reduction.tree_fold_triton import matrix_step, no_steps


@remembered
@triton.jit(do_not_specialize=["M"])
def qkv_kernel(
    x_ptr, wq_ptr, wk_ptr, wv_ptr, q_ptr, k_ptr, v_ptr, bq_ptr, bk_ptr, bv_ptr, M, NQ, NK, NV, K,
    stride_x, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    """The tiles of q, then those of k, then those of v, by pointers.

    A program chooses its weight before the loop over K, so one loop with one set of buffers is
    compiled. Descriptors cannot be chosen at run time.
    """
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_q = tiles_m * tl.cdiv(NQ, BLOCK_N)
    tiles_k = tiles_m * tl.cdiv(NK, BLOCK_N)
    w_ptr, y_ptr, bias_ptr, N = wq_ptr, q_ptr, bq_ptr, NQ
    if tile >= tiles_q + tiles_k:
        w_ptr, y_ptr, N = wv_ptr, v_ptr, NV
        tile -= tiles_q + tiles_k
        if HAS_BIAS:
            bias_ptr = bv_ptr
    elif tile >= tiles_q:
        w_ptr, y_ptr, N = wk_ptr, k_ptr, NK
        tile -= tiles_q
        if HAS_BIAS:
            bias_ptr = bk_ptr
    if OVERLAP:
        _, tile_n = tile_position(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        prefetch_rows(w_ptr, tile_n * BLOCK_N, N, K, stride_w, BLOCK_N, PREFETCHED)
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    pointer_tile(
        tile, x_ptr, w_ptr, y_ptr, bias_ptr, M, N, K, stride_x, 1, 1, stride_w, N,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, HAS_BIAS,
    )  # fmt: skip


@remembered
@triton.jit(do_not_specialize=["M"])
def gate_up_glu_tma_kernel(
    x_desc, gate_desc, up_desc, y_desc, gate_ptr, up_ptr, M, N, K, stride_gate, stride_up,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    """One tile of the result, from one tile of each product; by descriptors."""
    tile_m, tile_n = tile_position(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    if OVERLAP:
        prefetch_rows(gate_ptr, column, N, K, stride_gate, BLOCK_N, PREFETCHED)
        prefetch_rows(up_ptr, column, N, K, stride_up, BLOCK_N, PREFETCHED)
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for k in range(tl.cdiv(K, BLOCK_K)):
        x = x_desc.load([row, k * BLOCK_K])  # [BLOCK_M, BLOCK_K]
        gate = tl.dot(x, gate_desc.load([column, k * BLOCK_K]).T, gate)
        up = tl.dot(x, up_desc.load([column, k * BLOCK_K]).T, up)
    y_desc.store([row, column], glu_tile(gate, up, y_desc.dtype, ACTIVATION))


@remembered
@triton.jit(do_not_specialize=["M"])
def gate_up_glu_pointer_kernel(
    x_ptr, gate_ptr, up_ptr, y_ptr, M, N, K, stride_x, stride_gate, stride_up,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    """One tile of the result, from one tile of each product; by pointers. Rows of x and of the
    weights are contiguous."""
    tile_m, tile_n = tile_position(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    if OVERLAP:
        prefetch_rows(gate_ptr, tile_n * BLOCK_N, N, K, stride_gate, BLOCK_N, PREFETCHED)
        prefetch_rows(up_ptr, tile_n * BLOCK_N, N, K, stride_up, BLOCK_N, PREFETCHED)
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_x + steps[None, :]
    gate_ptrs = gate_ptr + steps[:, None] + columns[None, :] * stride_gate
    up_ptrs = up_ptr + steps[:, None] + columns[None, :] * stride_up
    gate = no_steps(BLOCK_M, BLOCK_N, x_ptr.dtype.element_ty)
    up = gate
    for k in range(0, K, BLOCK_K):
        left = K - k
        mask = (steps < left)[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptrs + k, mask=(rows < M)[:, None] & (steps < left)[None, :], other=0.0)
        gate_weight = tl.load(gate_ptrs + k, mask=mask, other=0.0)  # [BLOCK_K, BLOCK_N]
        up_weight = tl.load(up_ptrs + k, mask=mask, other=0.0)
        gate = matrix_step(x, gate_weight, gate)
        up = matrix_step(x, up_weight, up)
    y = glu_tile(gate.to(tl.float32), up.to(tl.float32), y_ptr.dtype.element_ty, ACTIVATION)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], y, mask=mask)


def qkv_fwd(
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    bq: Tensor | None,
    bk: Tensor | None,
    bv: Tensor | None,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x times three weights in one launch -> three results in the dtype of x.

    All sizes are positive. Either all biases are None or none is. `schedule` is a pointer schedule
    and changes no bit.
    """
    x = dense_rows(x)
    wq, wk, wv = (weight.contiguous() for weight in (wq, wk, wv))
    bq, bk, bv = (None if bias is None else bias.contiguous() for bias in (bq, bk, bv))
    outputs = _results(x, wq, wk, wv)
    m, inner = x.shape
    sizes = [weight.shape[0] for weight in (wq, wk, wv)]
    if schedule is None:
        schedule = pick_qkv(m, x.dtype, tuple(sizes), inner, x.device)
    tiles = cdiv(m, schedule.block_m) * sum(cdiv(n, schedule.block_n) for n in sizes)
    qkv_kernel[(tiles,)](
        x, wq, wk, wv, *outputs, bq, bk, bv, m, *sizes, inner, x.stride(0), inner,
        HAS_BIAS=bq is not None, **_options(schedule, x),
    )  # fmt: skip
    return outputs


def _results(x: Tensor, *weights: Tensor) -> Any:
    return tuple(x.new_empty((x.shape[0], weight.shape[0])) for weight in weights)


def gate_up_glu_fwd(
    x: Tensor, w_gate: Tensor, w_up: Tensor, activation: str, schedule: Schedule | None = None
) -> Tensor:
    """activation(x w_gate^T) * (x w_up^T) in one launch -> [M, N] in the dtype of x.

    All sizes are positive. `schedule` changes no bit.
    """
    x, w_gate, w_up = (dense_rows(matrix) for matrix in (x, w_gate, w_up))
    (y,) = _results(x, w_gate)
    (m, n), inner = y.shape, x.shape[1]
    if schedule is None:
        fits = takes_descriptors(x, w_gate, w_up, y)
        schedule = pick_gate_up(m, n, x.dtype, fits and has_tma(x.device), inner, x.device)
        # A stage holds two weight tiles.
        schedule = schedule.within(SHARED_BYTES // 2, x.element_size(), x.element_size())
    bm, bn, bk = schedule.block_m, schedule.block_n, schedule.block_k
    tiles = cdiv(m, bm) * cdiv(n, bn)
    options = _options(schedule, x, weights=2) | {"ACTIVATION": ACTIVATIONS.index(activation)}
    strides = w_gate.stride(0), w_up.stride(0)
    if schedule.kind == "tma":
        gate_up_glu_tma_kernel[(tiles,)](
            tile_descriptor(x, (bm, bk)),
            tile_descriptor(w_gate, (bn, bk)),
            tile_descriptor(w_up, (bn, bk)),
            tile_descriptor(y, (bm, bn)),
            w_gate, w_up, m, n, inner, *strides, **options,
        )  # fmt: skip
    else:
        gate_up_glu_pointer_kernel[(tiles,)](
            x, w_gate, w_up, y, m, n, inner, x.stride(0), *strides, **options
        )  # fmt: skip
    return y


def _options(schedule: Schedule, x: Tensor, weights: int = 1) -> dict[str, Any]:
    """Launch arguments of a program that reads a tile of so many `weights`; where the device can,
    the launch overlaps the end of the kernel ahead."""
    overlap, width = has_tma(x.device), x.element_size()
    return launch_options(schedule) | {
        "OVERLAP": overlap,
        "PREFETCHED": prefetched_columns(schedule.block_n, x.shape[1], width, weights),
        "launch_pdl": overlap,
    }


qkv_op = kernel_op(fake=lambda x, *given: _results(x, *given[:3]), name="qkv_op")(qkv_fwd)
gate_up_glu_op = kernel_op(fake=lambda x, w, *_: _results(x, w)[0], name="gate_up_glu_op")(
    gate_up_glu_fwd
)
