"""Products of rows with the weights of their experts on CUDA.

Shapes: a [rows or pairs, K], weights [E, N, K] ("nt") or [E, K, N] ("nn") -> [R * k, N], pairs in
    the order of `expert_pairs_op`. `gate_up_fwd`: x [R, K], weights [E, 2N, K] -> the gated
    activation [R * k, N] and, where asked for, both products [R * k, 2N].
Dtypes and rounding points, order: those of `linear` and `glu`: a pair has the bytes of a call with
    its expert's weights.
Invariant to: the other pairs, every field of a schedule.
Varies with: K; operand dtype.
Backward, errors: none.
Cost: the products, and a program that does nothing for each tile that could have been needed: the
    grid is that of the worst routing, since the host does not know the pairs.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.matrix_step import matrix_step, no_steps
from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.schedules import block_experts, most_tiles, pick_product
from rl_consistency.kernels.glu.activation_triton import ACTIVATIONS
from rl_consistency.kernels.linear.few_rows_triton import glu_tile
from rl_consistency.kernels.matmul.product_triton import GROUP_M, launch_options
from rl_consistency.kernels.matmul.schedules import Schedule


@triton.jit
def expert_tile(tile, first_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert of a tile of pairs, its first pair, and where the expert's pairs end.

    Each expert's pairs are cut into tiles of their own. Past the last tile the expert is E or more.
    """
    other = tl.arange(0, BLOCK_E)
    begin = tl.load(first_ptr + other, mask=other < E, other=0)
    end = tl.load(first_ptr + other + 1, mask=other < E, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((upto <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(other < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(other == expert, begin, 0), axis=0)
    stop = tl.sum(tl.where(other == expert, end, 0), axis=0)
    return expert, own + (tile - before) * BLOCK_M, stop


@triton.jit
def tile_in_grid(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The tile of pairs and the tile of columns of a program."""
    group = program // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return group * GROUP_M + within % height, within // height


@triton.jit
def operand_rows(place, stop, pairs_ptr, TOP_K: tl.constexpr, BY_ROW: tl.constexpr):
    """[BLOCK_M] int64, where the operand's rows of some pairs lie."""
    if BY_ROW:
        return tl.load(pairs_ptr + place, mask=place < stop, other=0).to(tl.int64) // TOP_K
    return place.to(tl.int64)


@remembered
@triton.jit(do_not_specialize=["tiles_m"])
def product_kernel(
    a_ptr, b_ptr, c_ptr, first_ptr, pairs_ptr, tiles_m, N, K, E,
    stride_a, stride_be, stride_bk, stride_bn,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile of one expert's product."""
    tile_m, tile_n = tile_in_grid(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, start, stop = expert_tile(tile_m, first_ptr, E, BLOCK_M, BLOCK_E)
    if expert < E:
        place = start + tl.arange(0, BLOCK_M)
        row = operand_rows(place, stop, pairs_ptr, TOP_K, BY_ROW)
        columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        steps = tl.arange(0, BLOCK_K).to(tl.int64)
        a_ptrs = a_ptr + row[:, None] * stride_a + steps[None, :]
        b_ptrs = b_ptr + expert.to(tl.int64) * stride_be
        b_ptrs += steps[:, None] * stride_bk + columns[None, :] * stride_bn
        present = (place < stop)[:, None]
        acc = no_steps(BLOCK_M, BLOCK_N, a_ptr.dtype.element_ty)
        for k in range(0, K, BLOCK_K):
            left = K - k
            a = tl.load(a_ptrs, mask=present & (steps < left)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(steps < left)[:, None] & (columns < N)[None, :], other=0.0)
            acc = matrix_step(a, b, acc)
            a_ptrs += BLOCK_K
            b_ptrs += tl.full((), BLOCK_K, tl.int64) * stride_bk
        c_ptrs = c_ptr + place.to(tl.int64)[:, None] * N + columns[None, :]
        c = acc.to(tl.float32).to(c_ptr.dtype.element_ty)
        tl.store(c_ptrs, c, mask=present & (columns < N)[None, :])


@remembered
@triton.jit(do_not_specialize=["tiles_m"])
def gate_up_kernel(
    x_ptr, w_ptr, y_ptr, packed_ptr, first_ptr, pairs_ptr, tiles_m, N, K, E,
    stride_x, stride_we, stride_wn, stride_wk,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, PACKED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of the gated activation, from one tile of each product; PACKED stores these too."""
    tile_m, tile_n = tile_in_grid(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, start, stop = expert_tile(tile_m, first_ptr, E, BLOCK_M, BLOCK_E)
    if expert < E:
        place = start + tl.arange(0, BLOCK_M)
        row = operand_rows(place, stop, pairs_ptr, TOP_K, True)
        columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        steps = tl.arange(0, BLOCK_K).to(tl.int64)
        x_ptrs = x_ptr + row[:, None] * stride_x + steps[None, :]
        gate_ptrs = w_ptr + expert.to(tl.int64) * stride_we
        gate_ptrs += steps[:, None] * stride_wk + columns[None, :] * stride_wn
        up_ptrs = gate_ptrs + tl.full((), N, tl.int64) * stride_wn
        present = (place < stop)[:, None]
        gate = no_steps(BLOCK_M, BLOCK_N, x_ptr.dtype.element_ty)
        up = gate
        for k in range(0, K, BLOCK_K):
            left = K - k
            mask = (steps < left)[:, None] & (columns < N)[None, :]
            x = tl.load(x_ptrs, mask=present & (steps < left)[None, :], other=0.0)
            gate_weight = tl.load(gate_ptrs, mask=mask, other=0.0)  # [BLOCK_K, BLOCK_N]
            up_weight = tl.load(up_ptrs, mask=mask, other=0.0)
            gate = matrix_step(x, gate_weight, gate)
            up = matrix_step(x, up_weight, up)
            x_ptrs += BLOCK_K
            gate_ptrs += tl.full((), BLOCK_K, tl.int64) * stride_wk
            up_ptrs += tl.full((), BLOCK_K, tl.int64) * stride_wk
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        dtype = y_ptr.dtype.element_ty
        inside = present & (columns < N)[None, :]
        at = place.to(tl.int64)[:, None]
        tl.store(
            y_ptr + at * N + columns[None, :], glu_tile(gate, up, dtype, ACTIVATION), mask=inside
        )
        if PACKED:
            packed = packed_ptr + at * (2 * N) + columns[None, :]
            tl.store(packed, gate.to(dtype), mask=inside)
            tl.store(packed + N, up.to(dtype), mask=inside)


def product_fwd(
    a: Tensor,
    weights: Tensor,
    layout: str,
    first: Tensor,
    pairs: Tensor,
    top_k: int,
    by_row: bool,
    schedule: Schedule | None = None,
) -> Tensor:
    """a times the weights of each pair's expert -> [R * k, N] in the dtype of a.

    `first` and `pairs` are those of `expert_pairs_op`. `by_row`: a has a row for each row of the
    call, not one for each pair. `schedule` changes no bit.
    """
    a = dense_rows(a)
    experts, n, k = weights.shape if layout == "nt" else weights.transpose(1, 2).shape
    c = a.new_empty((len(pairs), n))
    schedule = schedule or pick_product(len(pairs), experts, n, a.dtype)
    tiles_m = most_tiles(len(pairs), experts, schedule.block_m)
    stride_e, stride_k, stride_n = weights.stride()
    if layout == "nt":
        stride_k, stride_n = stride_n, stride_k
    product_kernel[(tiles_m * triton.cdiv(n, schedule.block_n),)](
        a, weights, c, first, pairs, tiles_m, n, k, experts, a.stride(0), stride_e, stride_k,
        stride_n, TOP_K=top_k, BY_ROW=by_row, BLOCK_E=block_experts(experts),
        **launch_options(schedule) | {"GROUP_M": GROUP_M},
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
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated activation of each pair [R * k, I], and gate and up [R * k, 2I] where `packed`."""
    x = dense_rows(x)
    experts, n, k = weights.shape
    n //= 2
    y = x.new_empty((len(pairs), n))
    both = x.new_empty((len(pairs) if packed else 0, 2 * n))
    schedule = schedule or pick_product(len(pairs), experts, n, x.dtype, gate_up=True)
    tiles_m = most_tiles(len(pairs), experts, schedule.block_m)
    gate_up_kernel[(tiles_m * triton.cdiv(n, schedule.block_n),)](
        x, weights, y, both, first, pairs, tiles_m, n, k, experts, x.stride(0), *weights.stride(),
        TOP_K=top_k, ACTIVATION=ACTIVATIONS.index(activation), PACKED=packed,
        BLOCK_E=block_experts(experts), **launch_options(schedule),
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
