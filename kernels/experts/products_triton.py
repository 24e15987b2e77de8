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

An expert's pairs are cut into tall tiles; pairs left for a tile that fit a short one take that.
Where a schedule has one tile, it is both.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.core.device import dense_rows, has_tma, takes_descriptors
from rl_consistency.kernels.core.launch import cdiv, remembered, tile_descriptor
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.experts.schedules import (
    Product,
    ProductSchedule,
    block_experts,
    most_tiles,
    pick_product,
)
from rl_consistency.kernels.matmul.product_triton import GROUP_M, tile_position
from rl_consistency.kernels.matmul.schedules import Schedule
from rl_consistency.kernels.pointwise.glu import ACTIVATIONS, glu_tile
from rl_consistency.kernels.reduction.tree_fold_triton import matrix_step, no_steps

MOST_STEPS = 128
"""The largest `block_k` of a schedule by descriptor."""


@triton.jit
def expert_tile(
    tile, first_ptr, E, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The expert of a tile of pairs, its first pair, and where the expert's pairs end.

    Each expert's pairs are cut into tiles of TALL_M of their own. Experts of more than BLOCK_M
    pairs come first, since their tiles take longest. Past the last tile the expert is E or more.
    """
    other = tl.arange(0, BLOCK_E)
    begin = tl.load(first_ptr + other, mask=other < E, other=0)
    end = tl.load(first_ptr + other + 1, mask=other < E, other=0)
    tiles = tl.cdiv(end - begin, TALL_M)
    if TALL_M > BLOCK_M:
        tall = (end - begin > BLOCK_M).to(tl.int32)
        ahead = tl.sum(tiles * tall, axis=0)
        tiles = tl.where(tall == (tile < ahead).to(tl.int32), tiles, 0)
        tile -= tl.where(tile < ahead, 0, ahead)
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((upto <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(other < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(other == expert, begin, 0), axis=0)
    stop = tl.sum(tl.where(other == expert, end, 0), axis=0)
    return expert, own + (tile - before) * TALL_M, stop


@triton.jit
def takes_short(start, stop, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr):
    """Whether the pairs left for a tile fit a short one; where all tiles are alike, they are it."""
    if TALL_M == BLOCK_M:
        return start < stop
    return stop - start <= BLOCK_M


@triton.jit
def operand_rows(place, stop, pairs_ptr, TOP_K: tl.constexpr, BY_ROW: tl.constexpr):
    """[BLOCK_M] int64, where the operand's rows of some pairs lie."""
    if BY_ROW:
        return tl.load(pairs_ptr + place, mask=place < stop, other=0).to(tl.int64) // TOP_K
    return place.to(tl.int64)


@triton.jit
def rows_of(a_ptr, a_desc, row, present, first_row, k, K, stride_a, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of the operand from k on, by pointers, or by descriptor where there is
    one, which also reads rows of other experts behind the last one."""
    if a_desc is None:
        steps = k + tl.arange(0, BLOCK_K)
        at = a_ptr + row[:, None] * stride_a + steps[None, :]
        a = tl.load(at, mask=present & (steps < K)[None, :], other=0.0)
    else:
        a = a_desc.load([first_row, k])
    return a


@triton.jit
def weights_of(
    b_ptr, b_desc, expert, column, k, N, K, COLUMNS, stride_be, stride_bk, stride_bn,
    NT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of an expert's weights from (k, column) on, of which the expert has
    COLUMNS; past N, a descriptor reads other weights."""
    if b_desc is None:
        steps = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
        columns = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
        at = b_ptr + expert.to(tl.int64) * stride_be
        at += steps[:, None] * stride_bk + columns[None, :] * stride_bn
        b = tl.load(at, mask=(steps < K)[:, None] & (columns < N)[None, :], other=0.0)
    elif NT:
        b = b_desc.load([expert * COLUMNS + column, k]).T
    else:
        b = b_desc.load([expert * K + k, column])
    return b


@triton.jit
def product_tile(
    a_ptr, a_desc, b_ptr, b_desc, c_ptr, packed_ptr, pairs_ptr, expert, start, stop, tile_n, N, K,
    stride_a, stride_be, stride_bk, stride_bn,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, NT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile of one expert's product; GATED: of the gated activation, from one
    tile each of gate and of up, which are stored too where there is a `packed_ptr`."""
    place = start + tl.arange(0, BLOCK_M)
    row = operand_rows(place, stop, pairs_ptr, TOP_K, BY_ROW)
    present = (place < stop)[:, None]
    column = tile_n * BLOCK_N
    acc = no_steps(BLOCK_M, BLOCK_N, a_ptr.dtype.element_ty)
    up = acc
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = rows_of(a_ptr, a_desc, row, present, start, k, K, stride_a, BLOCK_K)
        b = weights_of(  # [BLOCK_K, BLOCK_N]
            b_ptr, b_desc, expert, column, k, N, K, 2 * N if GATED else N, stride_be, stride_bk,
            stride_bn, NT, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = matrix_step(a, b, acc)
        if GATED:
            b_up = weights_of(
                b_ptr, b_desc, expert, N + column, k, 2 * N, K, 2 * N, stride_be, stride_bk,
                stride_bn, NT, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            up = matrix_step(a, b_up, up)
    dtype = c_ptr.dtype.element_ty
    columns = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = present & (columns < N)[None, :]
    at = place.to(tl.int64)[:, None]
    acc = acc.to(tl.float32)
    if GATED:
        up = up.to(tl.float32)
        c = glu_tile(acc, up, dtype, ACTIVATION)
    else:
        c = acc.to(dtype)
    tl.store(c_ptr + at * N + columns[None, :], c, mask=inside)
    if packed_ptr is not None:
        packed = packed_ptr + at * (2 * N) + columns[None, :]
        tl.store(packed, acc.to(dtype), mask=inside)
        tl.store(packed + N, up.to(dtype), mask=inside)


@remembered
@triton.jit(do_not_specialize=["tiles_m"])
def product_kernel(
    a_ptr, a_desc, tall_a_desc, b_ptr, b_desc, tall_b_desc, c_ptr, packed_ptr, first_ptr, pairs_ptr,
    tiles_m, N, K, E, stride_a, stride_be, stride_bk, stride_bn,
    TOP_K: tl.constexpr, BY_ROW: tl.constexpr, NT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TALL_M: tl.constexpr, TALL_N: tl.constexpr, TALL_K: tl.constexpr, TALL_STAGES: tl.constexpr,
    GROUP_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's product or gated activation: a tall one, or a short one for at most
    BLOCK_M pairs."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    tile_m, tile_n = tile_position(tl.program_id(0), tiles_m, N, 1, BLOCK_N, GROUP_M)
    expert, start, stop = expert_tile(tile_m, first_ptr, E, BLOCK_M, TALL_M, BLOCK_E)
    if expert < E:
        if takes_short(start, stop, BLOCK_M, TALL_M):
            product_tile(
                a_ptr, a_desc, b_ptr, b_desc, c_ptr, packed_ptr, pairs_ptr, expert, start, stop,
                tile_n, N, K, stride_a, stride_be, stride_bk, stride_bn, TOP_K, BY_ROW, NT, GATED,
                ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif TALL_M > BLOCK_M and tile_n * TALL_N < N:
            product_tile(
                a_ptr, tall_a_desc, b_ptr, tall_b_desc, c_ptr, packed_ptr, pairs_ptr, expert, start,
                stop, tile_n, N, K, stride_a, stride_be, stride_bk, stride_bn, TOP_K, BY_ROW, NT,
                GATED, ACTIVATION, TALL_M, TALL_N, TALL_K, TALL_STAGES,
            )  # fmt: skip


def described(weights: Tensor, layout: str) -> bool:
    """Whether descriptors can address weights on their device: all experts as one matrix.

    In layout "nn" a tile may reach into the next expert's first rows, unless K is a multiple of
    every `BLOCK_K`; zeros times these would be NaN where they are infinite.
    """
    whole = layout == "nt" or weights.shape[1] % MOST_STEPS == 0
    able = has_tma(weights.device) and weights.is_contiguous()
    return whole and able and takes_descriptors(weights)


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


def _launch(
    product: Product, operands: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor | None],
    first: Tensor, pairs: Tensor, top_k: int, by_row: bool, schedule: ProductSchedule | None,
    activation: int = 0,
) -> None:  # fmt: skip
    """Write c [R * k, N], and gate and up [R * k, 2N] to the second result if there is one. Where
    the device can, the launch overlaps the end of the kernel ahead."""
    (a, weights), (c, packed) = operands, results
    a, layout = dense_rows(a), "nn" if product == "nn" else "nt"
    (count, n), k, experts, rows = c.shape, a.shape[1], len(weights), len(pairs) // top_k
    if schedule is None:
        tma = described(weights, layout)
        schedule = pick_product(product, count, experts, n, k, a.dtype, tma, a.device)
    short, tall = schedule.tiles(rows)
    b_descs = [_weights_descriptor(weights, layout, tile) for tile in (short, tall)]
    a_descs: list[Any] = [None, None]
    if schedule.kind == "tma" and not by_row and takes_descriptors(a):
        a_descs = [tile_descriptor(a, (tile.block_m, tile.block_k)) for tile in (short, tall)]
    tiles_m, overlap = most_tiles(count, rows, experts, tall.block_m), has_tma(a.device)
    stride_e, stride_k, stride_n = weights.stride()
    if layout == "nt":
        stride_k, stride_n = stride_n, stride_k
    product_kernel[(tiles_m * cdiv(n, short.block_n),)](
        a, *a_descs, weights, *b_descs, c, packed, first, pairs, tiles_m, n, k, experts,
        a.stride(0), stride_e, stride_k, stride_n, TOP_K=top_k, BY_ROW=by_row, NT=layout == "nt",
        GATED=product == "gate_up", ACTIVATION=activation, BLOCK_E=block_experts(experts),
        BLOCK_M=short.block_m, BLOCK_N=short.block_n, BLOCK_K=short.block_k, STAGES=short.stages,
        TALL_M=tall.block_m, TALL_N=tall.block_n, TALL_K=tall.block_k, TALL_STAGES=tall.stages,
        GROUP_M=GROUP_M, OVERLAP=overlap, launch_pdl=overlap, num_warps=short.warps,
        num_stages=short.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _product_fake(
    a: Tensor, weights: Tensor, layout: str, first: Tensor, pairs: Tensor, top_k: int, by_row: bool
) -> Tensor:
    return a.new_empty((pairs.shape[0], weights.shape[1 if layout == "nt" else 2]))


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
    c = _product_fake(a, weights, layout, first, pairs, top_k, by_row)
    product: Product = "nt" if layout == "nt" else "nn"
    _launch(product, (a, weights), (c, None), first, pairs, top_k, by_row, schedule)
    return c


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
    y, both = _gate_up_fake(x, weights, first, pairs, top_k, activation, packed)
    results = y, both if packed else None
    of_pairs = first, pairs, top_k, True, schedule, ACTIVATIONS.index(activation)
    _launch("gate_up", (x, weights), results, *of_pairs)
    return y, both


expert_product_op = kernel_op(fake=_product_fake, name="expert_product_op")(product_fwd)
expert_gate_up_op = kernel_op(fake=_gate_up_fake, name="expert_gate_up_op")(gate_up_fwd)
