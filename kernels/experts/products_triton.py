"""Products of rows with the weights of their experts on CUDA.

Shapes: a [rows or pairs, K], weights [E, N, K] ("nt") or [E, K, N] ("nn") -> [R * k, N], pairs in
    the order of `expert_pairs_op`. `gate_up_fwd`: x [R, K], weights [E, 2N, K] -> the gated
    activation [R * k, N] and, where asked for, both products [R * k, 2N].
Dtypes and rounding points, order: those of `linear` and `glu`: a pair has the bytes of a call with
    its expert's weights.
Invariant to: the other pairs, every field of a schedule.
Varies with: K; operand dtype.
Backward: none.
Errors: ValueError on a descriptor schedule for weights that descriptors cannot address.
Cost: the products, and a program that does nothing for each tile that could have been needed: the
    grid is that of the worst routing, since the host does not know the pairs. Where routing is not
    even, tall tiles keep an expert's weights from being read once for every few rows.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import has_tma, takes_descriptors
from rl_consistency.kernels.core.grid import cdiv
from rl_consistency.kernels.core.matrix_step import matrix_step, no_steps
from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.tile_descriptor import tile_descriptor
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.schedules import (
    ProductSchedule,
    block_experts,
    most_tiles,
    pick_product,
)
from rl_consistency.kernels.experts.tiles_triton import (
    expert_tile,
    operand_rows,
    rows_of,
    takes_short,
    tile_in_grid,
    weights_of,
)
from rl_consistency.kernels.glu.activation_triton import ACTIVATIONS
from rl_consistency.kernels.linear.few_rows_triton import glu_tile
from rl_consistency.kernels.matmul.product_triton import launch_options
from rl_consistency.kernels.matmul.schedules import Schedule

MOST_STEPS = 128
"""The largest `block_k` of a schedule by descriptor."""


@triton.jit
def product_tile(
    a_ptr, a_desc, b_ptr, b_desc, c_ptr, pairs_ptr, expert, start, stop, tile_n, N, K,
    stride_a, stride_be, stride_bk, stride_bn,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, NT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile of one expert's product."""
    place = start + tl.arange(0, BLOCK_M)
    row = operand_rows(place, stop, pairs_ptr, TOP_K, BY_ROW)
    present = (place < stop)[:, None]
    column = tile_n * BLOCK_N
    acc = no_steps(BLOCK_M, BLOCK_N, a_ptr.dtype.element_ty)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = rows_of(a_ptr, a_desc, row, present, start, k, K, stride_a, BLOCK_K)
        b = weights_of(
            b_ptr, b_desc, expert, column, k, N, K, N, stride_be, stride_bk, stride_bn,
            NT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = matrix_step(a, b, acc)
    columns = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
    c_ptrs = c_ptr + place.to(tl.int64)[:, None] * N + columns[None, :]
    c = acc.to(tl.float32).to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, c, mask=present & (columns < N)[None, :])


@remembered
@triton.jit(do_not_specialize=["tiles_m"])
def product_kernel(
    a_ptr, a_desc, tall_a_desc, b_ptr, b_desc, tall_b_desc, c_ptr, first_ptr, pairs_ptr, tiles_m,
    N, K, E, stride_a, stride_be, stride_bk, stride_bn,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, NT: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TALL_M: tl.constexpr, TALL_N: tl.constexpr, TALL_K: tl.constexpr, TALL_STAGES: tl.constexpr,
    GROUP_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's product: a tall one, or a short one for at most BLOCK_M pairs."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    tile_m, tile_n = tile_in_grid(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, start, stop = expert_tile(tile_m, first_ptr, E, BLOCK_M, TALL_M, BLOCK_E)
    if expert < E:
        if takes_short(start, stop, BLOCK_M, TALL_M):
            product_tile(
                a_ptr, a_desc, b_ptr, b_desc, c_ptr, pairs_ptr, expert, start, stop, tile_n, N, K,
                stride_a, stride_be, stride_bk, stride_bn, TOP_K, BY_ROW, NT,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif TALL_M > BLOCK_M and tile_n * TALL_N < N:
            product_tile(
                a_ptr, tall_a_desc, b_ptr, tall_b_desc, c_ptr, pairs_ptr, expert, start, stop,
                tile_n, N, K, stride_a, stride_be, stride_bk, stride_bn, TOP_K, BY_ROW, NT,
                TALL_M, TALL_N, TALL_K, TALL_STAGES,
            )  # fmt: skip


@triton.jit
def gate_up_tile(
    x_ptr, w_ptr, w_desc, y_ptr, packed_ptr, row, expert, start, stop, tile_n, N, K,
    stride_x, stride_we, stride_wn, stride_wk, ACTIVATION: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of the gated activation, from one tile of each product; PACKED stores these too.

    `row` [BLOCK_M] says which rows of x those of the tile are.
    """
    place = start + tl.arange(0, BLOCK_M)
    present = (place < stop)[:, None]
    column = tile_n * BLOCK_N
    gate = no_steps(BLOCK_M, BLOCK_N, x_ptr.dtype.element_ty)
    up = gate
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = rows_of(x_ptr, None, row, present, start, k, K, stride_x, BLOCK_K)
        gate_weight = weights_of(  # [BLOCK_K, BLOCK_N]
            w_ptr, w_desc, expert, column, k, N, K, 2 * N, stride_we, stride_wk, stride_wn,
            True, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gate = matrix_step(x, gate_weight, gate)
        up_weight = weights_of(
            w_ptr, w_desc, expert, N + column, k, 2 * N, K, 2 * N, stride_we, stride_wk,
            stride_wn, True, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = matrix_step(x, up_weight, up)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    columns = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = present & (columns < N)[None, :]
    at = place.to(tl.int64)[:, None]
    tl.store(y_ptr + at * N + columns[None, :], glu_tile(gate, up, dtype, ACTIVATION), mask=inside)
    if PACKED:
        packed = packed_ptr + at * (2 * N) + columns[None, :]
        tl.store(packed, gate.to(dtype), mask=inside)
        tl.store(packed + N, up.to(dtype), mask=inside)


@remembered
@triton.jit(do_not_specialize=["tiles_m"])
def gate_up_kernel(
    x_ptr, w_ptr, w_desc, tall_w_desc, y_ptr, packed_ptr, first_ptr, pairs_ptr, tiles_m, N, K, E,
    stride_x, stride_we, stride_wn, stride_wk,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, PACKED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TALL_M: tl.constexpr, TALL_N: tl.constexpr, TALL_K: tl.constexpr, TALL_STAGES: tl.constexpr,
    GROUP_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's gated activation: a tall one, or a short one for at most BLOCK_M
    pairs."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    tile_m, tile_n = tile_in_grid(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, start, stop = expert_tile(tile_m, first_ptr, E, BLOCK_M, TALL_M, BLOCK_E)
    if expert < E:
        if takes_short(start, stop, BLOCK_M, TALL_M):
            row = operand_rows(start + tl.arange(0, BLOCK_M), stop, pairs_ptr, TOP_K, True)
            gate_up_tile(
                x_ptr, w_ptr, w_desc, y_ptr, packed_ptr, row, expert, start, stop, tile_n,
                N, K, stride_x, stride_we, stride_wn, stride_wk, ACTIVATION, PACKED,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif TALL_M > BLOCK_M and tile_n * TALL_N < N:
            tall_row = operand_rows(start + tl.arange(0, TALL_M), stop, pairs_ptr, TOP_K, True)
            gate_up_tile(
                x_ptr, w_ptr, tall_w_desc, y_ptr, packed_ptr, tall_row, expert, start, stop,
                tile_n, N, K, stride_x, stride_we, stride_wn, stride_wk, ACTIVATION, PACKED,
                TALL_M, TALL_N, TALL_K, TALL_STAGES,
            )  # fmt: skip


def described(weights: Tensor, layout: str) -> bool:
    """Whether descriptors can address weights on their device: all experts as one matrix.

    In layout "nn" a tile may reach into the next expert's first rows, unless K is a multiple of
    every `BLOCK_K`; zeros times these would be NaN where they are infinite.
    """
    whole = layout == "nt" or weights.shape[1] % MOST_STEPS == 0
    return (
        whole
        and has_tma(weights.device)
        and weights.is_contiguous()
        and (takes_descriptors(weights))
    )


def _weights_descriptor(weights: Tensor, layout: str, schedule: Schedule) -> Any:
    """What copies the weights of a tile; None for one of pointers."""
    if schedule.kind != "tma":
        return None
    if not described(weights, layout):
        raise ValueError(
            f"experts: schedule {schedule.name} copies by descriptor, which needs contiguous "
            f"weights of 16-byte rows; got {tuple(weights.shape)} in layout {layout!r}. Use a "
            "pointer schedule."
        )
    box = schedule.block_n, schedule.block_k
    return tile_descriptor(weights.flatten(0, 1), box if layout == "nt" else box[::-1])


def _options(short: Schedule, tall: Schedule, x: Tensor) -> dict[str, Any]:
    """Launch arguments; where the device can, the launch overlaps the end of the kernel ahead."""
    overlap = has_tma(x.device)
    return launch_options(short) | {
        "STAGES": short.stages,
        "TALL_M": tall.block_m,
        "TALL_N": tall.block_n,
        "TALL_K": tall.block_k,
        "TALL_STAGES": tall.stages,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
    }


def product_fwd(
    a: Tensor,
    weights: Tensor,
    layout: str,
    first: Tensor,
    pairs: Tensor,
    top_k: int,
    by_row: bool,
    schedule: ProductSchedule | None = None,
) -> Tensor:
    """a times the weights of each pair's expert -> [R * k, N] in the dtype of a.

    `first` and `pairs` are those of `expert_pairs_op`. `by_row`: a has a row for each row of the
    call, not one for each pair. `schedule` changes no bit.
    """
    a = dense_rows(a)
    experts, n, k = weights.shape if layout == "nt" else weights.transpose(1, 2).shape
    count, rows = len(pairs), len(pairs) // top_k
    c = a.new_empty((count, n))
    if schedule is None:
        tma = described(weights, layout)
        schedule = pick_product(layout, count, experts, n, k, a.dtype, tma, a.device)
    short, tall = schedule.tiles(rows)
    b_descs = [_weights_descriptor(weights, layout, tile) for tile in (short, tall)]
    a_descs: list[Any] = [None, None]
    if schedule.kind == "tma" and not by_row and takes_descriptors(a):
        a_descs = [tile_descriptor(a, (tile.block_m, tile.block_k)) for tile in (short, tall)]
    tiles_m = most_tiles(count, rows, experts, tall.block_m)
    stride_e, stride_k, stride_n = weights.stride()
    if layout == "nt":
        stride_k, stride_n = stride_n, stride_k
    product_kernel[(tiles_m * cdiv(n, short.block_n),)](
        a, *a_descs, weights, *b_descs, c, first, pairs, tiles_m, n, k, experts, a.stride(0),
        stride_e, stride_k, stride_n, TOP_K=top_k, BY_ROW=by_row, NT=layout == "nt",
        BLOCK_E=block_experts(experts), **_options(short, tall, a),
    )  # fmt: skip
    return c


def gate_up_fwd(
    x: Tensor,
    weights: Tensor,
    first: Tensor,
    pairs: Tensor,
    top_k: int,
    activation: str,
    packed: bool,
    schedule: ProductSchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated activation of each pair [R * k, I], and gate and up [R * k, 2I] where `packed`."""
    x = dense_rows(x)
    experts, n, k = weights.shape
    n //= 2
    count, rows = len(pairs), len(pairs) // top_k
    y = x.new_empty((count, n))
    both = x.new_empty((count if packed else 0, 2 * n))
    if schedule is None:
        tma = described(weights, "nt")
        schedule = pick_product("gate_up", count, experts, n, k, x.dtype, tma, x.device)
    short, tall = schedule.tiles(rows)
    w_descs = [_weights_descriptor(weights, "nt", tile) for tile in (short, tall)]
    tiles_m = most_tiles(count, rows, experts, tall.block_m)
    gate_up_kernel[(tiles_m * cdiv(n, short.block_n),)](
        x, weights, *w_descs, y, both, first, pairs, tiles_m, n, k, experts, x.stride(0),
        *weights.stride(), TOP_K=top_k, ACTIVATION=ACTIVATIONS.index(activation), PACKED=packed,
        BLOCK_E=block_experts(experts), **_options(short, tall, x),
    )  # fmt: skip
    return y, both


def _product_fake(
    a: Tensor, weights: Tensor, layout: str, first: Tensor, pairs: Tensor, top_k: int, by_row: bool
) -> Tensor:
    return a.new_empty((pairs.shape[0], weights.shape[1 if layout == "nt" else 2]))


@kernel_op(fake=_product_fake)
def expert_product_op(
    a: Tensor, weights: Tensor, layout: str, first: Tensor, pairs: Tensor, top_k: int, by_row: bool
) -> Tensor:
    """`product_fwd` as a compiler sees it: one opaque call."""
    return product_fwd(a, weights, layout, first, pairs, top_k, by_row)


def _gate_up_fake(
    x: Tensor,
    weights: Tensor,
    first: Tensor,
    pairs: Tensor,
    top_k: int,
    activation: str,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    count, n = pairs.shape[0], weights.shape[1]
    return x.new_empty((count, n // 2)), x.new_empty((count if packed else 0, n))


@kernel_op(fake=_gate_up_fake)
def expert_gate_up_op(
    x: Tensor,
    weights: Tensor,
    first: Tensor,
    pairs: Tensor,
    top_k: int,
    activation: str,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    """`gate_up_fwd` as a compiler sees it: one opaque call."""
    return gate_up_fwd(x, weights, first, pairs, top_k, activation, packed)
