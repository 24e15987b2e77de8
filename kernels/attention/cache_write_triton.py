"""A layer's cache of keys or values, and cache[slot[t]] = new[t] for both at once.

Shapes: k, v [T, Hkv, D]; caches [num_blocks, block_size, Hkv, D]; slots [T] int64.
Memory: a cache's slots lie at one distance from each other, and so do its heads. `zero_cache` says
    which is the faster way. No bit depends on it.
Dtypes and rounding points: any dtype, a copy of its bits.
Order: none. Of tokens that share a slot (only in the dummy block) any may be written last.
Invariant to: everything. Varies with: nothing. Backward: none; a cache has no gradient.
Errors: ValueError on shapes, strides, dtypes and devices. Slots are not checked: the host would
    have to wait.
Cost: memory-bound; on CUDA one launch for keys and values.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv, next_power_of_2, remembered

MAX_COLUMNS = 4096
"""Elements of a token that one program holds at once."""

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
