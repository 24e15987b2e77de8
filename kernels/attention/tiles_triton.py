"""What the kernels of attention share: one call as they see it, and in Triton a tile's rows and
keys, loads, one block's sums, and writing out a finished tile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    AttentionLayout,
    PackedSequences,
    PagedAttention,
    SequenceTables,
)
from rl_consistency.kernels.attention.schedules import LOG2E, NO_WINDOW, ForwardPlan
from rl_consistency.kernels.core.launch import tile_descriptor
from rl_consistency.kernels.reduction.tree_fold_triton import fold_to_lanes, tree_fold

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def tile_of(tiles, query_start, query_len, context_len, KV_HEADS: tl.constexpr):
    """(sequence, KV head, first row, row of the first token, queries, keys) of a program's tile."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    q_len = tl.load(query_len + sequence)
    limit = tl.load(context_len + sequence)
    return sequence, kv_head, first_row, tl.load(query_start + sequence), q_len, limit


@triton.jit
def keys_of(
    first_row, q_len, limit, window,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """(position of a tile's first row, of its last row, start of the first key block they see)."""
    first_position = limit - q_len + first_row // GROUP
    last_position = tl.minimum(limit - q_len + (first_row + ROWS - 1) // GROUP, limit - 1)
    low = 0
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    return first_position, last_position, low


@triton.jit
def rows_of(first_row, pid_head, query_len, past, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(valid, token in the sequence, head, position) of a tile's rows, each [ROWS].

    Row r of a sequence and KV head is query r // GROUP, head r % GROUP of the group.
    """
    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP
    return row < query_len * GROUP, token, pid_head * GROUP + row % GROUP, past + token


@triton.jit
def addresses(base, row, head, stride_row, stride_head, DIM: tl.constexpr):
    """[ROWS, DIM] pointers to rows of [T, heads, D]; `head` is one number or [ROWS, 1]."""
    return base + row[:, None] * stride_row + head * stride_head + tl.arange(0, DIM)[None, :]


@triton.jit
def load_rows(
    base, descriptor, table, start, row0, head, limit, stride_row, stride_head, block_size,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SOURCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + KEYS of one sequence and head, [KEYS, DIM], zeros past `limit`.

    SOURCE: 0 packed, by pointer; 1 a paged cache, through `table`; 2 packed, by descriptor.
    """
    if SOURCE == 2 and not MASKED:
        # An unmasked block has no rows past the sequence.
        tile = descriptor.load([row0 + start, head, 0])
        return tl.reshape(tile, (KEYS, DIM))
    key = start + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    if SOURCE == 1:
        inside = key < limit
        block = tl.load(table + key // block_size, mask=inside, other=0)
        row = block.to(tl.int64) * block_size + key % block_size
    else:
        row = (row0 + key).to(tl.int64)
    pointer = addresses(base, row, head, stride_row, stride_head, DIM)
    if MASKED or SOURCE == 1:
        mask = (key < limit)[:, None] & (dim < HEAD_DIM)[None, :]
        return tl.load(pointer, mask=mask, other=0.0)
    if HEAD_DIM != DIM:
        return tl.load(pointer, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointer)


@triton.jit
def visible(query, key, window):
    """Whether a query sees a key; both are broadcast."""
    distance = query - key
    return (distance >= 0) & (distance < window)


@triton.jit
def finite(m, MASKED: tl.constexpr):
    """m, or 0 for a row that has seen no key: -inf minus -inf would be NaN."""
    if MASKED:
        m = tl.where(m == NEG_INF, 0.0, m)
    return m


@triton.jit
def block_sums(
    q, k, v, position, start, window, factor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of one block of keys: m [ROWS] in log2 units, lanes [ROWS, 8], acc [ROWS, DIM]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
    if MASKED:
        key = start + tl.arange(0, KEYS)
        scores = tl.where(visible(position[:, None], key[None, :], window), scores, NEG_INF)
    m = tl.max(scores, 1) * factor
    p = tl.exp2(tl.fma(scores, factor, -finite(m, MASKED)[:, None]))
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m, fold_to_lanes(p, ROWS, KEYS), acc


@triton.jit
def write_rows(
    OUT, LSE, m, lanes, acc, valid, token_row, head, stride_ot, stride_oh, stride_lse,
    ROWS: tl.constexpr, HEAD_DIM, DIM: tl.constexpr,
):  # fmt: skip
    """Divide a tile's sums and write o and lse: m [ROWS], lanes [ROWS, 8], acc [ROWS, DIM]."""
    length = tree_fold(lanes, ROWS, 8)
    seen = length > 0
    out = acc * tl.div_rn(1.0, tl.where(seen, length, 1.0))[:, None] + 0.0
    pointer = addresses(OUT, token_row, head[:, None], stride_ot, stride_oh, DIM)
    mask = valid[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    tl.store(pointer, out.to(OUT.dtype.element_ty), mask=mask)
    if LSE.dtype.element_ty == tl.float64:
        m, length = m.to(tl.float64), length.to(tl.float64)
    lse = tl.where(seen, (m + tl.log2(length)) * LN2, NEG_INF)
    tl.store(LSE + token_row * stride_lse + head, lse, mask=valid)


def dense(x: Tensor) -> Tensor:
    """x [T, heads, D] as kernels and descriptors address it: copied if the elements of a head do
    not lie side by side, rows overlap as those of `expand` do, or heads lie 2^31 elements apart."""
    rows, heads, columns = x.shape
    row, head, element = x.stride()
    apart = (row >= columns or rows <= 1) and (head >= columns or heads <= 1)
    if element == 1 and apart and (heads - 1) * head < 1 << 31:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def sources(described: bool, box: list[int], *tensors: Tensor) -> list[Any]:
    """The [T, heads, D] tensors, each behind a descriptor of `box` if `described`."""
    if not described:
        return list(tensors)
    return [tile_descriptor(x, box) for x in tensors]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What every kernel is launched with. The elements of a head lie side by side."""

    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hkv, D] packed, or [slots, Hkv, D] of a paged cache; v alike
    v: Tensor
    out: Tensor  # [T, H, D], and lse [T, H]
    lse: Tensor
    layout: AttentionLayout
    scale: float
    window: int | None

    @cached_property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @cached_property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.kv_heads

    @cached_property
    def tables(self) -> SequenceTables:
        return self.layout.tables(self.q.device)

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """First row, queries and keys of each sequence, int32."""
        return self.tables.query_start, self.tables.query_len, self.tables.context_len

    @property
    def factor(self) -> float:
        """The scale of the scores in log2 units."""
        return self.scale * LOG2E

    @property
    def reach(self) -> int:
        """The window as kernels take it."""
        return NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)

    @property
    def operand_strides(self) -> tuple[int, ...]:
        """Strides of a token and a head in q, k and v."""
        return (*self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2])

    @property
    def shape(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel but those of KV heads and of tiles."""
        windowed = self.window is not None
        return {"GROUP": self.group, "HEAD_DIM": self.head_dim, "WINDOWED": windowed}


@dataclass(frozen=True, kw_only=True)
class ForwardCall(AttentionCall):
    """A forward call: the kernels write `out` and `lse`."""

    plan: ForwardPlan

    @cached_property
    def tiles(self) -> Tensor:
        """[tiles, 2] int32: a sequence and the tile's first row in it."""
        return self.layout.tiles(self.q.device, self.group, self.plan.schedule.rows)

    @property
    def block_size(self) -> int | None:
        """Tokens in one physical block; None where keys are packed."""
        return self.layout.block_size if isinstance(self.layout, PagedAttention) else None

    @property
    def result_strides(self) -> tuple[int, ...]:
        """Strides of a token and a head in o, and of a token in lse."""
        return (*self.out.stride()[:2], self.lse.stride(0))

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments and options that the Triton kernels share."""
        return {
            **self.shape,
            "KV_HEADS": self.kv_heads,
            "ROWS": self.plan.schedule.rows,
            "KEYS": self.plan.keys,
            "DIM": self.plan.columns,
            "num_stages": self.plan.schedule.stages,
            "enable_fp_fusion": False,
        }

    def memory_of_blocks(self, grid: int, stored: int) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 memory for every key block's m [places], lanes [places, 8] and acc [places,
        columns]. `grid` is tiles times KV heads, and a block writes `stored` rows.
        """
        places = grid * self.plan.most_blocks * stored
        m, lanes, acc = (
            torch.empty(shape, dtype=torch.float32, device=self.q.device)
            for shape in ((places,), (places, 8), (places, self.plan.columns))
        )
        return m, lanes, acc


@dataclass(frozen=True, kw_only=True)
class BackwardCall(AttentionCall):
    """A backward call: the kernels fill dq, dk and dv."""

    layout: PackedSequences
    do: Tensor  # [T, H, D], the gradient of `out`
    dq: Tensor  # [T, H, D]
    dk: Tensor  # [T, Hkv, D], and dv alike
    dv: Tensor
