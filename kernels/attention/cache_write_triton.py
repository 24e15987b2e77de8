"""cache[slot[t]] = new[t], for keys and values at once.

Shapes: k, v [T, Hkv, D]; caches [num_blocks, block_size, Hkv, D]; slots [T] int64.
Dtypes and rounding points: any dtype, a copy of its bits.
Order: none. Of tokens that share a slot (only in the dummy block) any may be written last.
Invariant to: everything. Varies with: nothing. Backward: none; a cache has no gradient.
Errors: ValueError on shapes, strides, dtypes and devices. Slots are not checked: the host would
    have to wait.
Cost: memory-bound; on CUDA one launch for keys and values.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.core.remembered_launch import remembered

MAX_COLUMNS = 4096
"""Elements of a token that one program holds at once."""


@remembered
@triton.jit(do_not_specialize=["slot_ptr"])
def cache_write_kernel(
    k_ptr, v_ptr, key_cache, value_cache, slot_ptr, k_token, k_head, v_token, v_head,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy COLUMNS of a token's ROW = Hkv * D elements. Grid: (T, ROW / COLUMNS rounded up)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < ROW
    head, dim = column // HEAD_DIM, column % HEAD_DIM
    k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=inside)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=inside)
    tl.store(key_cache + slot * ROW + column, k, mask=inside)
    tl.store(value_cache + slot * ROW + column, v, mask=inside)


def cache_write(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Store new tokens' k and v [T, Hkv, D] in their slots of one layer's cache.

    The caches are contiguous; a slot is block * block_size + offset, below num_blocks * block_size.
    """
    require_cache(k, v, key_cache, value_cache, slots)
    if k.is_cuda:
        cache_write_fwd(k, v, key_cache, value_cache, slots)
        return
    for cache, new in ((key_cache, k), (value_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


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
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("cache_write: the caches must be contiguous.")
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
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEAD_DIM=head_dim, ROW=row, COLUMNS=columns, num_warps=max(1, min(8, columns // 256)),
    )  # fmt: skip
