"""Triton schedules of the gradient fold: outer products, columns, embedding rows.

Shapes, dtypes, order, invariance: those of `gradient_fold`.
Errors: `fold_outer` refuses a schedule that the operands or the device cannot run (ValueError).
Cost: outer products run at the rate of a matrix product plus one read and one write of the
    gradient; columns and rows are memory-bound.

An accumulator tile is loaded from the gradient, continued and stored by one program. No program
writes what another one reads, and nothing is added atomically.
"""

# Triton gives the arguments of a kernel their meaning, and its types do not say so.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_consistency.kernels.cuda_device import has_tma, sm_count
from rl_consistency.kernels.gradient_fold_schedules import Schedule, pick
from rl_consistency.kernels.library import kernel_op
from rl_consistency.kernels.matrix_step import matrix_step
from rl_consistency.kernels.tree_fold import halve

STEP = 16
"""Tokens in one step of the fold; the depth of the multiply-accumulate instruction."""

GROUP = 8
"""Rows of tiles walked together, so that neighbouring programs share operands in the L2 cache."""

BATCH = 64
"""Step sums that a program of `fold_step_sums` has in flight."""

EXACT = {"enable_fp_fusion": False}


# ---- outer products ------------------------------------------------------------------------------


@triton.jit
def tile_of(index, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile, GROUP rows of tiles at a time."""
    rows, columns = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    first = index // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = index % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def gradient_part(g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """Pointers [ROWS, COLUMNS] into the gradient from (n, k), and which of them are inside."""
    row = n + tl.arange(0, ROWS)
    column = k + tl.arange(0, COLUMNS)
    offsets = row.to(tl.int64)[:, None] * stride_gn + column.to(tl.int64)[None, :] * stride_gk
    return g_ptr + offsets, (row < N)[:, None] & (column < K)[None, :]


@triton.jit
def load_part(g_ptr, n, k, N, K, stride_gn, stride_gk, FRESH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    if FRESH:
        return tl.zeros((ROWS, COLUMNS), g_ptr.dtype.element_ty)
    pointers, inside = gradient_part(g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS, COLUMNS)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_part(acc, g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, HALVINGS: tl.constexpr):  # fmt: skip
    """Store `acc`; piece by piece, its columns halved, where registers for pointers are short."""
    if HALVINGS:
        FURTHER: tl.constexpr = HALVINGS - 1
        left, right = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        store_part(left, g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS, COLUMNS // 2, FURTHER)
        middle = k + COLUMNS // 2
        store_part(right, g_ptr, n, middle, N, K, stride_gn, stride_gk, ROWS, COLUMNS // 2, FURTHER)
    else:
        pointers, inside = gradient_part(g_ptr, n, k, N, K, stride_gn, stride_gk, ROWS, COLUMNS)
        tl.store(pointers, acc + 0.0, mask=inside)


@triton.jit
def _outer_pointer_kernel(
    dy_ptr,
    x_ptr,
    g_ptr,
    T,
    N,
    K,
    stride_dy,
    stride_x,
    stride_gn,
    stride_gk,
    FRESH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_n, tile_k = tile_of(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, GROUP)
    first_n, first_k = tile_n * BLOCK_N, tile_k * BLOCK_K
    acc = load_part(g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K)
    if dy_ptr.dtype.element_ty == tl.float32:
        acc = acc.to(tl.float64)
    n = first_n + tl.arange(0, BLOCK_N)
    k = first_k + tl.arange(0, BLOCK_K)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        row = t.to(tl.int64)[:, None]
        present = (t < T)[:, None]
        dy = tl.load(  # [BLOCK_T, BLOCK_N]
            dy_ptr + row * stride_dy + n[None, :], mask=present & (n < N)[None, :], other=0.0
        )
        x = tl.load(  # [BLOCK_T, BLOCK_K]
            x_ptr + row * stride_x + k[None, :], mask=present & (k < K)[None, :], other=0.0
        )
        acc = matrix_step(dy.T, x, acc)
    store_part(acc, g_ptr, first_n, first_k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K, 0)


@triton.jit
def _outer_descriptor_tile(
    index,
    dy_desc,
    x_desc,
    extra_desc,
    g_ptr,
    T,
    N,
    K,
    stride_gn,
    stride_gk,
    FRESH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA_N: tl.constexpr,
    EXTRA_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    EXTRA: tl.constexpr = EXTRA_N + EXTRA_K > 0
    HEIGHT: tl.constexpr = EXTRA_N if EXTRA_N else BLOCK_N
    WIDTH: tl.constexpr = EXTRA_K if EXTRA_K else BLOCK_K
    tile_n, tile_k = tile_of(index, N, K, BLOCK_N + EXTRA_N, BLOCK_K + EXTRA_K, GROUP)
    n, k = tile_n * (BLOCK_N + EXTRA_N), tile_k * (BLOCK_K + EXTRA_K)
    extra_n = n + BLOCK_N if EXTRA_N else n
    extra_k = k + BLOCK_K if EXTRA_K else k
    acc = load_part(g_ptr, n, k, N, K, stride_gn, stride_gk, FRESH, BLOCK_N, BLOCK_K)
    if EXTRA:
        extra = load_part(g_ptr, extra_n, extra_k, N, K, stride_gn, stride_gk, FRESH, HEIGHT, WIDTH)
    # A descriptor reads zeros beyond the last token and column.
    remaining = T
    for t in range(0, T, BLOCK_T):
        dy = dy_desc.load([t, n])  # [BLOCK_T, BLOCK_N]
        x = x_desc.load([t, k])  # [BLOCK_T, BLOCK_K]
        acc = tl.dot(dy.T, x, acc)
        if EXTRA_N:
            extra = tl.dot(extra_desc.load([t, extra_n]).T, x, extra)
        if EXTRA_K:
            extra = tl.dot(dy.T, extra_desc.load([t, extra_k]), extra)
        remaining -= BLOCK_T
    # Zero, which the compiler cannot see: pointers are made anew instead of kept during the loop.
    none = tl.maximum(remaining, 0)
    store_part(
        acc, g_ptr, n + none, k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K, 2 if EXTRA else 0
    )
    if EXTRA:
        store_part(
            extra, g_ptr, extra_n + none, extra_k, N, K, stride_gn, stride_gk, HEIGHT, WIDTH, 1
        )


# One token as a constant would unroll the loop and keep operands beside the stored tile.
@triton.jit(do_not_specialize=["T"])
def _outer_tma_kernel(
    dy_desc,
    x_desc,
    extra_desc,
    g_ptr,
    T,
    N,
    K,
    stride_gn,
    stride_gk,
    FRESH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA_N: tl.constexpr,
    EXTRA_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    first = tl.program_id(0)
    if PERSISTENT:
        tiles = tl.cdiv(N, BLOCK_N + EXTRA_N) * tl.cdiv(K, BLOCK_K + EXTRA_K)
        for index in range(first, tiles, tl.num_programs(0)):
            _outer_descriptor_tile(
                index, dy_desc, x_desc, extra_desc, g_ptr, T, N, K, stride_gn, stride_gk,
                FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, GROUP,
            )  # fmt: skip
    else:
        _outer_descriptor_tile(
            first, dy_desc, x_desc, extra_desc, g_ptr, T, N, K, stride_gn, stride_gk,
            FRESH, BLOCK_N, BLOCK_K, EXTRA_N, EXTRA_K, BLOCK_T, GROUP,
        )  # fmt: skip


def takes_descriptors(*operands: Tensor) -> bool:
    """Whether rows of the operands [T, C] can be copied by descriptor: 16-byte starts, C dense."""
    return all(
        operand.stride(1) == 1
        and operand.stride(0) >= operand.shape[1]
        and operand.data_ptr() % 16 == 0
        and operand.stride(0) * operand.element_size() % 16 == 0
        for operand in operands
    )


def launch_outer(buffer: Tensor, dy: Tensor, x: Tensor, fresh: bool, schedule: Schedule) -> None:
    """Run one schedule; operands [T, N] and [T, K] with dense rows, T > 0."""
    if schedule.kind != "pointer" and not takes_descriptors(dy, x):
        raise ValueError(
            f"gradient_fold: schedule {schedule.kind!r} copies by descriptor, which needs 16-byte "
            f"aligned rows; strides are {dy.stride()} and {x.stride()}. Use a 'pointer' schedule."
        )
    tokens, n, k = dy.shape[0], dy.shape[1], x.shape[1]
    programs = schedule.tiles(n, k)
    if schedule.persistent:
        programs = min(programs, sm_count(buffer.device) * schedule.resident)
    sizes = (buffer, tokens, n, k)
    blocks = {
        "FRESH": fresh,
        "BLOCK_N": schedule.block_n,
        "BLOCK_K": schedule.block_k,
        "BLOCK_T": schedule.block_t,
        "GROUP": GROUP,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "maxnreg": schedule.registers,
        **EXACT,
    }
    if schedule.kind == "tma":
        _outer_tma_kernel[(programs,)](
            TensorDescriptor.from_tensor(dy, [schedule.block_t, schedule.block_n]),
            TensorDescriptor.from_tensor(x, [schedule.block_t, schedule.block_k]),
            _extra_descriptor(dy, x, schedule),
            *sizes,
            *buffer.stride(),
            EXTRA_N=schedule.extra_n,
            EXTRA_K=schedule.extra_k,
            PERSISTENT=schedule.persistent,
            **blocks,
        )
    else:
        _outer_pointer_kernel[(programs,)](
            dy, x, *sizes, dy.stride(0), x.stride(0), *buffer.stride(), **blocks
        )


def _extra_descriptor(dy: Tensor, x: Tensor, schedule: Schedule) -> TensorDescriptor:
    """Of the operand tile that only the second accumulator needs; unused where there is none."""
    if schedule.extra_n:
        return TensorDescriptor.from_tensor(dy, [schedule.block_t, schedule.extra_n])
    columns = schedule.extra_k or schedule.block_k
    return TensorDescriptor.from_tensor(x, [schedule.block_t, columns])


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def gradient_fold_outer(buffer: Tensor, dy: Tensor, x: Tensor, fresh: bool) -> None:
    """Continue `buffer` [N, K] (fp32, or fp64 for fp32 operands) over the tokens of dy [T, N] and
    x [T, K].
    """
    if min(*buffer.shape, dy.shape[0]) == 0:
        return
    dy, x = _dense_rows(dy), _dense_rows(x)
    schedule = pick(
        dy.shape[0],
        *buffer.shape,
        dy.dtype,
        tma=has_tma(buffer.device) and takes_descriptors(dy, x),
        processors=sm_count(buffer.device),
    )
    launch_outer(buffer, dy, x, fresh, schedule)


def _dense_rows(operand: Tensor) -> Tensor:
    return operand if operand.stride(1) == 1 else operand.contiguous()


# ---- columns -------------------------------------------------------------------------------------


@triton.jit
def _pair(rows_ptr, row, columns, inside, last, stride, FIRST: tl.constexpr, P: tl.constexpr):
    """Rows FIRST and FIRST + 8 of sixteen, each of P rows of the matrix, added."""
    low, high = row + FIRST * P, row + (FIRST + 8) * P
    a = tl.load(
        rows_ptr + low.to(tl.int64) * stride + columns, mask=inside & (low < last), other=0.0
    )
    b = tl.load(
        rows_ptr + high.to(tl.int64) * stride + columns, mask=inside & (high < last), other=0.0
    )
    return a.to(tl.float32) + b.to(tl.float32)


@triton.jit
def _step_sums_kernel(
    rows_ptr,
    sums_ptr,
    R,
    C,
    stride,
    STEP_ROWS: tl.constexpr,
    P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The halving tree over one step's rows, filled with zeros to 16 * P of them."""
    step = tl.program_id(0)
    within = tl.arange(0, P * BLOCK_C)
    columns = tl.program_id(1) * BLOCK_C + within % BLOCK_C
    inside = columns < C
    first = step * STEP_ROWS
    row = first + within // BLOCK_C
    last = tl.minimum(first + STEP_ROWS, R)
    # Four levels of the tree between registers of one thread, the others between the P rows left.
    even = _pair(rows_ptr, row, columns, inside, last, stride, 0, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 4, P
    )
    even += _pair(rows_ptr, row, columns, inside, last, stride, 2, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 6, P
    )
    odd = _pair(rows_ptr, row, columns, inside, last, stride, 1, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 5, P
    )
    odd += _pair(rows_ptr, row, columns, inside, last, stride, 3, P) + _pair(
        rows_ptr, row, columns, inside, last, stride, 7, P
    )
    total = tl.reshape(even + odd, (1, P * BLOCK_C))
    for level in tl.static_range(P.bit_length() - 1):
        total = halve(total, 1, P * BLOCK_C >> level)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(
        sums_ptr + step.to(tl.int64) * C + columns, tl.reshape(total, (BLOCK_C,)), mask=columns < C
    )


@triton.jit
def _fold_steps_kernel(
    sums_ptr, buffer_ptr, S, C, stride, BATCH: tl.constexpr, BLOCK_C: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    pointers = buffer_ptr + columns.to(tl.int64) * stride
    acc = tl.load(pointers, mask=inside, other=0.0)
    # Nothing is written in the loop, so all loads of a batch are issued before its additions.
    row = sums_ptr + columns
    for start in range(0, S, BATCH):
        for i in tl.static_range(BATCH):
            step_sum = tl.load(row + i * C, mask=inside & (start + i < S), other=0.0)
            acc += step_sum.to(acc.dtype)
        row += BATCH * C
    tl.store(pointers, acc, mask=inside)


def step_sums(rows: Tensor, rows_per_token: int) -> Tensor:
    """Halving tree over every step's rows: [T * rows_per_token, C] -> [ceil(T / 16), C] fp32."""
    rows = _dense_rows(rows)
    num_rows, columns = rows.shape
    step = STEP * rows_per_token
    sums = rows.new_empty((triton.cdiv(num_rows, step), columns), dtype=torch.float32)
    padded = triton.next_power_of_2(rows_per_token)
    block = min(triton.next_power_of_2(columns), max(1024 // padded, 16))
    _step_sums_kernel[(sums.shape[0], triton.cdiv(columns, block))](
        rows,
        sums,
        num_rows,
        columns,
        rows.stride(0),
        STEP_ROWS=step,
        P=padded,
        BLOCK_C=block,
        num_warps=4,
        **EXACT,
    )
    return sums


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def fold_step_sums(buffer: Tensor, sums: Tensor) -> None:
    """Continue `buffer` [C] (fp64 or fp32) over step sums [S, C] (fp32, contiguous), S upward."""
    steps, columns = sums.shape
    if min(steps, columns) == 0:
        return
    block = 32
    _fold_steps_kernel[(triton.cdiv(columns, block),)](
        sums,
        buffer,
        steps,
        columns,
        buffer.stride(0),
        BATCH=BATCH,
        BLOCK_C=block,
        num_warps=1,
        **EXACT,
    )


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def gradient_fold_columns(buffer: Tensor, rows: Tensor, rows_per_token: int) -> None:
    """Continue `buffer` [C] (fp64 or fp32) over rows [T * rows_per_token, C]."""
    if min(rows.shape) == 0:
        return
    fold_step_sums(buffer, step_sums(rows, rows_per_token))


# ---- embedding rows ------------------------------------------------------------------------------


@triton.jit
def _fold_rows_kernel(
    rows_ptr,
    buffer_ptr,
    id_ptr,
    end_ptr,
    token_ptr,
    V,
    C,
    stride_row,
    stride_v,
    stride_c,
    BATCH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per sorted position and block of columns; the first of an id walks them all."""
    position = tl.program_id(0)
    row_id = tl.load(id_ptr + position)
    previous = tl.load(id_ptr + position - 1, mask=position > 0, other=-1)
    # -1 marks rows to skip; it also stands before the first position. An id that nobody could look
    # at may lie outside the table.
    if (row_id != previous) & (row_id >= 0) & (row_id < V):
        end = tl.load(end_ptr + position)
        columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = columns < C
        pointers = buffer_ptr + row_id.to(tl.int64) * stride_v + columns.to(tl.int64) * stride_c
        acc = tl.load(pointers, mask=inside, other=0.0)  # fp32 or fp64
        # Most ids occur once; the loop is for the others.
        token = tl.load(token_ptr + position)
        row = tl.load(rows_ptr + token * stride_row + columns, mask=inside, other=0.0)
        acc += row.to(acc.dtype)
        for start in range(position + 1, end, BATCH):
            for i in tl.static_range(BATCH):
                present = start + i < end
                token = tl.load(token_ptr + start + i, mask=present, other=0)
                row = tl.load(
                    rows_ptr + token * stride_row + columns, mask=inside & present, other=0.0
                )
                acc += row.to(acc.dtype)
        tl.store(pointers, acc, mask=inside)


@kernel_op(mutates=("buffer",), fake=lambda *_: None)
def gradient_fold_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """Continue `buffer` [V, C] (fp32 or fp64): row index[t] += rows[t], upward; -1 skips a row."""
    if min(*rows.shape) == 0:
        return
    rows = _dense_rows(rows)
    # 32-bit keys halve the passes of the sort, which is stable: tokens of an id stay in order.
    ids, tokens = torch.sort(index.to(torch.int32), stable=True)
    ends = torch.searchsorted(ids, ids, right=True, out_int32=True)
    columns = rows.shape[1]
    block = min(triton.next_power_of_2(columns), 1024)
    _fold_rows_kernel[(index.shape[0], triton.cdiv(columns, block))](
        rows,
        buffer,
        ids,
        ends,
        tokens,
        buffer.shape[0],
        columns,
        rows.stride(0),
        *buffer.stride(),
        BATCH=16,
        BLOCK_C=block,
        num_warps=4,
        **EXACT,
    )
