"""y = a @ b, row by row: the order that all other products build on.

Shapes: `matmul_nt`: a [M, K], b [N, K], bias [N] -> [M, N]. `matmul_nn`: a [M, K], b [K, N] ->
    [M, N]. On a CPU only: `row_matmul`: a [M, K], b [K, N] -> [M, N] fp32; `tile_matmul`:
    a [B, m, K], b [B, K, N] -> [B, m, N] fp32.
Dtypes and rounding points: fp32, bf16, fp16; accumulation in fp32 (fp32 on CUDA: in fp64); bias
    added in fp32; one rounding to `out_dtype` (none in `row_matmul` and `tile_matmul`).
Order: ORDER below, `matmul`.
Invariant to: M, the position of a row, the other rows, the number of products in the batch.
Varies with: K; the device. On a CPU also N, the library version and the number of threads.
Backward: none here; `linear`, `attention` and `token_logprobs` differentiate.
Errors: none here; callers check their operands.
Cost: on a CPU 1 to 2 times a plain `torch.mm` (2 cores, M = 300); on CUDA see docs/speed.md.

On a CPU the product runs as equal tiles of 16 rows. A matrix library chooses its code path by the
shape of a product, so tiles of one shape give a row the same bits at every position. The paddings
avoid other code paths: the library may split a lone product over threads, and it treats a ragged N
apart. With both, no row changed for any M, position or number of threads that was tried.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.core.operand import aligned
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.kernels.matmul import cublaslt
from rl_consistency.kernels.matmul.product_triton import matmul_op

TILE_ROWS = 16
MIN_TILES = 2
COLUMN_MULTIPLE = 16

ORDER = ReductionOrder(
    id="matmul",
    version=3,
    cpu="""\
rows in tiles of 16, at least 2 tiles a call; columns padded with zeros to a multiple of 16
acc[m, n] = product of one tile and all columns by the matrix library: fp32, from zero, K upward
y[m, n] = round(acc[m, n] + fp32(bias[n]))
""",
    cuda="""\
acc[m, n] = 0                    # fp32; fp64 for fp32 operands
for each 16 elements of K, upward, with zeros after a ragged end:
    bf16, fp16: acc[m, n] = one step of the matrix unit on acc[m, n]
    fp32: acc[m, n] += fp32 sum of the 16 products, from zero, by fused multiply-adds
y[m, n] = round(fp32(acc[m, n]) + fp32(bias[n]))
""",
)


def matmul_nt(
    a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """a [M, K] @ b [N, K]^T + bias [N] -> [M, N], rounded once to `out_dtype` (fp32, bf16 or fp16).

    a, b and bias share a dtype. A row's bits depend only on that row, `b` and `bias`.
    """
    if a.is_cuda:
        return _cuda_product(a, b, bias, "nt", out_dtype)
    product = row_matmul(a, b.t())
    return (product if bias is None else product + bias.float()).to(out_dtype)


def matmul_nn(a: Tensor, b: Tensor, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] @ b [K, N] -> [M, N], rounded once to `out_dtype` (fp32, bf16 or fp16).

    a and b share a dtype. A row's bits depend only on that row and `b`.
    """
    if a.is_cuda:
        return _cuda_product(a, b, None, "nn", out_dtype)
    return row_matmul(a, b).to(out_dtype)


def _cuda_product(
    a: Tensor, b: Tensor, bias: Tensor | None, layout: str, out_dtype: torch.dtype
) -> Tensor:
    columns = b.shape[0 if layout == "nt" else 1]
    if a.shape[0] == 0 or columns == 0:
        return a.new_empty((a.shape[0], columns), dtype=out_dtype)
    if a.shape[1] == 0:
        empty = a.new_zeros((a.shape[0], columns), dtype=torch.float32)
        return (empty if bias is None else empty + bias.float()).to(out_dtype)
    if torch.compiler.is_compiling():
        return matmul_op(a, b, bias, layout, out_dtype)
    product = cublaslt.product(a, b, bias, layout, out_dtype)
    return matmul_op(a, b, bias, layout, out_dtype) if product is None else product


def row_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] -> [M, N] fp32 on a CPU; a row's bits depend only on that row and `b`.

    `b` may be a transposed view.
    """
    num_rows, inner = a.shape
    num_columns = b.shape[1]
    if num_rows == 0 or num_columns == 0:
        return a.new_zeros((num_rows, num_columns), dtype=torch.float32)
    tiles = max(cdiv(num_rows, TILE_ROWS), MIN_TILES)
    a = F.pad(a.float(), (0, 0, 0, tiles * TILE_ROWS - num_rows)).contiguous()
    ragged = -num_columns % COLUMN_MULTIPLE
    b = F.pad(b.float(), (0, ragged)) if ragged else b.float()
    product = torch.bmm(
        aligned(a).view(tiles, TILE_ROWS, inner), aligned(b).expand(tiles, inner, b.shape[1])
    )
    return product.view(tiles * TILE_ROWS, -1)[:num_rows, :num_columns]


def tile_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [B, m, K] @ b [B, K, N] -> [B, m, N] on a CPU, all fp32; N is a multiple of 16.

    A product's bits depend only on its own operands.
    """
    count = a.shape[0]
    if count < MIN_TILES:
        a = F.pad(a, (0, 0, 0, 0, 0, MIN_TILES - count))
        b = F.pad(b, (0, 0, 0, 0, 0, MIN_TILES - count))
    return torch.bmm(a, b)[:count]
