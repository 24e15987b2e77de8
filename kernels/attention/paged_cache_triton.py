"""Queries and keys of new tokens on their way into attention over a paged cache: normed, rotated,
keys and values stored.

`paged_inputs`: q' = rotary(rms_norm(q)), k' = rotary(rms_norm(k)), cache[slot[t]] = (k', v).
`cache_write`: cache[slot[t]] = new[t] for keys and values at once. One launch each on CUDA.

Shapes: q [T, H, D], k and v [T, Hkv, D], norm weights [D], cos and sin [T, D/2], caches
    [num_blocks, block_size, Hkv, D], slots [T] int64 -> q' [T, H, D], k' [T, Hkv, D].
Memory: a cache's slots lie at one distance from each other, and so do its heads. `zero_cache` says
    which is the faster way. No bit depends on it.
Dtypes and rounding points: those of `rms_norm` and `rotary`, one after the other; caches have the
    bits of what is written, of any dtype.
Order: `rms_norm.ORDER` and `rotary.ORDER`; the bytes are those of the separate ops. Of tokens that
    share a slot (only in the dummy block) any may be written last.
Invariant to: everything except a token's own values and position. Varies with: D.
Backward: none; a cache has no gradient.
Errors: those of the separate ops; ValueError on shapes, strides, dtypes and devices, and where a
    gradient is wanted. Slots are not checked: the host would have to wait.
Cost: one launch instead of four. A decode step of a small model waits for launches, not for bytes.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.core.device import dense_rows, has_tma
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered
from rl_consistency.kernels.pointwise.rotary import require_rotary, rotary
from rl_consistency.kernels.rms_norm.norm_triton import mean_of, row_tree
from rl_consistency.kernels.rms_norm.op import require_norm, rms_norm
from rl_consistency.kernels.rms_norm.schedules import block_width

MOST_HEADS = 8
"""Heads of one program of `paged_inputs`."""
MAX_COLUMNS = 4096
"""Elements of a token that one program of `cache_write` holds at once."""

APART_BELOW = 128
"""Columns of a head from which the heads of a token lie side by side. Narrower ones are read faster
where the tokens of one head do: paged decode takes 2 to 5 % less (heads of 64 to 96, H100)."""
MOST_APART = 1 << 31
"""Elements: kernels compute the distance of two heads in 32 bits."""


def zero_cache(
    blocks: int, block_size: int, heads: int, head_dim: int, *,
    dtype: torch.dtype, device: torch.device | str,
) -> Tensor:  # fmt: skip
    """Zeros [blocks, block_size, heads, head_dim], in memory as decoding reads them fastest."""
    slots = blocks * block_size
    apart = torch.device(device).type == "cuda" and head_dim < APART_BELOW
    if apart and heads * slots * head_dim < MOST_APART:
        memory = torch.zeros(heads, blocks, block_size, head_dim, dtype=dtype, device=device)
        return memory.permute(1, 2, 0, 3)
    return torch.zeros(blocks, block_size, heads, head_dim, dtype=dtype, device=device)


@remembered
@triton.jit(do_not_specialize=["slot_ptr"])
def cache_write_kernel(
    k_ptr, v_ptr, key_cache, value_cache, slot_ptr, k_token, k_head, v_token, v_head, cache_slot,
    cache_head, HEAD_DIM: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy COLUMNS of a token's ROW = Hkv * D elements. Grid: (T, ROW / COLUMNS rounded up)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < ROW
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=inside)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=inside)
    written = slot * cache_slot + head.to(tl.int64) * cache_head + dim
    tl.store(key_cache + written, k, mask=inside)
    tl.store(value_cache + written, v, mask=inside)


def cache_write(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Store new tokens' k and v [T, Hkv, D] in their slots of one layer's cache.

    A slot is block * block_size + offset, below num_blocks * block_size.
    """
    require_cache(k, v, key_cache, value_cache, slots)
    if k.is_cuda:
        cache_write_fwd(k, v, key_cache, value_cache, slots)
        return
    for cache, new in ((key_cache, k), (value_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


def write_cache(paged: PagedAttention, layer: int, k: Tensor, v: Tensor) -> None:
    """`cache_write` into the slots of a layer's cache."""
    cache_write(k, v, paged.key_cache[layer], paged.value_cache[layer], paged.slot_mapping)


def require_cache(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Check the operands of `cache_write`; raises what the module's Errors line says."""
    tensors = {"k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}
    shape, cache = k.shape, key_cache.shape
    fits = shape == v.shape and shape == (*slots.shape, *cache[2:])
    if not fits or cache != value_cache.shape or slots.dim() != 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(
            f"cache_write: {shapes}, slots {tuple(slots.shape)}; k and v are [T, Hkv, D], the "
            "caches [num_blocks, block_size, Hkv, D], slots [T]."
        )
    block, slot, _, element = strides = key_cache.stride()
    if strides != value_cache.stride() or element != 1 or block != cache[1] * slot:
        raise ValueError(
            f"cache_write: caches with strides {strides} and {value_cache.stride()}; they must be "
            "equal, with dense heads and one distance between slots. `zero_cache` makes such ones."
        )
    dtype, device = k.dtype, k.device
    alike = all(t.dtype == dtype and t.device == device for t in (v, key_cache, value_cache))
    if not alike or slots.device != device:
        found = ", ".join(f"{name} {t.dtype} on {t.device}" for name, t in tensors.items())
        raise ValueError(
            f"cache_write: {found}, slots on {slots.device}; one dtype and one device are needed."
        )


def cache_write_fwd(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """`cache_write` by the Triton kernel."""
    tokens, heads, head_dim = k.shape
    row = heads * head_dim
    if tokens * row == 0:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    columns = min(next_power_of_2(row), MAX_COLUMNS)
    cache_write_kernel[(tokens, cdiv(row, columns))](
        k, v, key_cache, value_cache, slots.contiguous(),
        *k.stride()[:2], *v.stride()[:2], *key_cache.stride()[1:3],
        HEAD_DIM=head_dim, ROW=row, COLUMNS=columns, num_warps=max(1, min(8, columns // 256)),
    )  # fmt: skip


class HeadNorms(NamedTuple):
    """The norms of query heads and of key heads (qk-norm)."""

    q_weight: Tensor
    k_weight: Tensor
    q_eps: float
    k_eps: float


def paged_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    paged: PagedAttention,
    layer: int,
    *,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor]:
    """(q', k') of new tokens; stores k' and v in their slots of a layer's cache.

    Without `norms` q and k are only rotated.
    """
    operands = (q, k, v, *(norms[:2] if norms else ()))
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        raise ValueError(
            "paged_inputs: computes no gradients. Call it under torch.no_grad(), or use "
            "rms_norm() and rotary() and write the cache yourself."
        )
    slots, caches = paged.slot_mapping, (paged.key_cache[layer], paged.value_cache[layer])
    if not q.is_cuda:
        if norms is not None:
            q, k = (
                rms_norm(x, weight, eps)
                for x, weight, eps in zip((q, k), norms[:2], norms[2:], strict=True)
            )
        q, k = rotary(q, k, cos, sin)
        cache_write(k, v, *caches, slots)
        return q, k
    require_rotary(q, k, cos, sin)
    require_cache(k, v, *caches, slots)
    if norms is not None:
        require_norm("paged_inputs: q", norms.q_weight, x=q)
        require_norm("paged_inputs: k", norms.k_weight, x=k)
    return paged_inputs_fwd(q, k, v, cos, sin, norms, *caches, slots)


@triton.jit
def _rotated_heads(
    x_ptr, weight_ptr, eps, cos, sin, head, stride_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of HEADS heads of one token, normed and rotated: [HEADS, BLOCK_HALF] each."""
    column = tl.arange(0, BLOCK_HALF)
    inside = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    first = x_ptr + head[:, None] * stride_head + column[None, :]
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if NORM:
        wide = tl.arange(0, BLOCK)
        inside_row = (head < NUM_HEADS)[:, None] & (wide < 2 * HALF)[None, :]
        x = tl.load(x_ptr + head[:, None] * stride_head + wide[None, :], mask=inside_row, other=0.0)
        x = x.to(tl.float32)
        mean_square = mean_of(row_tree(x * x, HEADS, BLOCK), HEADS, 2 * HALF)
        rstd = tl.div_rn(tl.full((HEADS,), 1.0, tl.float32), tl.sqrt_rn(mean_square + eps))[:, None]
        w1 = tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight_ptr + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        # The separate norm rounds its result to the dtype.
        x1 = ((x1 * rstd) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * rstd) * w2[None, :]).to(dtype).to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit
def _store_halves(out_ptr, y1, y2, head, stride_head, NUM_HEADS: tl.constexpr, HALF: tl.constexpr,
                  BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Both halves of heads."""
    column = tl.arange(0, BLOCK_HALF)
    inside = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    written = out_ptr + head[:, None] * stride_head + column[None, :]
    tl.store(written, y1, mask=inside)
    tl.store(written + HALF, y2, mask=inside)


@remembered
@triton.jit(do_not_specialize=["slot_ptr", "q_eps", "k_eps"])
def paged_inputs_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, q_eps, k_eps, cos_ptr, sin_ptr, slot_ptr,
    q_out_ptr, k_out_ptr, key_cache, value_cache, q_token, q_head, k_token, k_head, v_token, v_head,
    cos_token, sin_token, cache_slot, cache_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token. Grid: (T, parts of the query heads, then parts of the key heads)."""
    if OVERLAP:
        # Nothing is read before the kernel ahead is done.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    parts_of_q: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + token * cos_token + column, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * sin_token + column, mask=column < HALF, other=0.0)[None, :]
    if part < parts_of_q:
        head = part * HEADS + tl.arange(0, HEADS)
        y1, y2 = _rotated_heads(q_ptr + token * q_token, q_weight_ptr, q_eps, cos, sin, head,
                                q_head, Q_HEADS, HALF, NORM, HEADS, BLOCK, BLOCK_HALF)  # fmt: skip
        written = q_out_ptr + token * (Q_HEADS * 2 * HALF)
        _store_halves(written, y1, y2, head, 2 * HALF, Q_HEADS, HALF, BLOCK_HALF)
    else:
        head = (part - parts_of_q) * HEADS + tl.arange(0, HEADS)
        y1, y2 = _rotated_heads(k_ptr + token * k_token, k_weight_ptr, k_eps, cos, sin, head,
                                k_head, K_HEADS, HALF, NORM, HEADS, BLOCK, BLOCK_HALF)  # fmt: skip
        written = k_out_ptr + token * (K_HEADS * 2 * HALF)
        _store_halves(written, y1, y2, head, 2 * HALF, K_HEADS, HALF, BLOCK_HALF)
        slot, wide_head = tl.load(slot_ptr + token) * cache_slot, head.to(tl.int64)
        _store_halves(key_cache + slot, y1, y2, wide_head, cache_head, K_HEADS, HALF, BLOCK_HALF)
        wide = tl.arange(0, BLOCK)
        inside = (head < K_HEADS)[:, None] & (wide < 2 * HALF)[None, :]
        read = v_ptr + token * v_token + head[:, None] * v_head + wide[None, :]
        v = tl.load(read, mask=inside, other=0.0)
        stored = value_cache + slot + wide_head[:, None] * cache_head + wide[None, :]
        tl.store(stored, v, mask=inside)


def paged_inputs_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """(q', k'), dense; writes the caches, whose strides are equal. `norms` None: no qk-norm."""
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    if q.numel() == 0:
        return q_out, k_out
    q, k, v, cos, sin = (dense_rows(x) for x in (q, k, v, cos, sin))
    heads = min(MOST_HEADS, next_power_of_2(q_heads))
    block, overlap = block_width(head_dim), has_tma(q.device)
    q_weight, k_weight, q_eps, k_eps = norms or (None, None, 0.0, 0.0)
    paged_inputs_kernel[(tokens, cdiv(q_heads, heads) + cdiv(k_heads, heads))](
        q, k, v, None if q_weight is None else q_weight.contiguous(),
        None if k_weight is None else k_weight.contiguous(), q_eps, k_eps, cos, sin,
        slots.contiguous(), q_out, k_out, key_cache, value_cache, *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], cos.stride(0), sin.stride(0), *key_cache.stride()[1:3],
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=head_dim // 2, NORM=norms is not None, HEADS=heads,
        BLOCK=block, BLOCK_HALF=next_power_of_2(head_dim // 2), OVERLAP=overlap, launch_pdl=overlap,
        num_warps=max(1, min(4, heads * block // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out
