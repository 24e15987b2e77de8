"""The backward pass on sm_90 for heads of 129 to 256, with specialised warps: one kernel for dq
(`dq`), one for dk and dv (`dkv`).

One kernel for all (`hopper/backward.py`) would pass the sums of dq through memory after every 64
keys, since the sums of dk and dv for more would not fit the registers: twice the bytes of its
operands. So scores are computed twice, as `backward_triton` does, and the bits are the same.
"""

from __future__ import annotations

from torch import Tensor

from rl_consistency.kernels.attention.backward_statistics_triton import statistics_of
from rl_consistency.kernels.attention.hopper.tiles import OPTIONS, head_descriptor
from rl_consistency.kernels.attention.hopper.wide.dkv import attention_wide_dkv_kernel
from rl_consistency.kernels.attention.hopper.wide.dq import attention_wide_dq_kernel
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.schedules import LOG2E, SEVEN_PRODUCTS, padded, reach


def attention_wide_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    layout: PackedSequences,
    scale: float,
    window: int | None,
) -> None:
    """Fill `gradients`, that is dq, dk and dv."""
    heads, head_dim = q.shape[1:]
    kv_heads, dim, device = k.shape[1], padded(head_dim), q.device
    dq, dk, dv = gradients
    tables = layout.tables(device)
    stat_tiles, first_tiles = layout.query_tiles(device, SEVEN_PRODUCTS.rows)
    statistics, _counters = statistics_of(do, out, lse, layout, SEVEN_PRODUCTS.rows)
    q_desc, do_desc, k_desc, v_desc = (
        head_descriptor(x, SEVEN_PRODUCTS.rows, 1, dim) for x in (q, do, k, v)
    )
    numbers = (
        first_tiles, tables.query_start, tables.query_len, reach(window), len(stat_tiles),
        scale * LOG2E, scale, *k.stride()[:2], *v.stride()[:2],
    )  # fmt: skip
    shared = {
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "WINDOWED": window is not None,
        "maxnreg": 168,
        **OPTIONS,
    }
    tiles = layout.tiles(device, 1, 2 * SEVEN_PRODUCTS.rows)
    attention_wide_dq_kernel[(len(tiles) * heads,)](
        k, v, statistics, dq, q_desc, do_desc, k_desc, v_desc, tiles, *numbers, *dq.stride()[:2],
        HEADS=heads, num_warps=4, **shared,
    )  # fmt: skip
    tiles = layout.key_tiles(device, SEVEN_PRODUCTS.keys)
    attention_wide_dkv_kernel[(len(tiles) * kv_heads,)](
        k, v, statistics, dk, dv, q_desc, do_desc, tiles, *numbers, *dk.stride()[:2],
        *dv.stride()[:2], KV_HEADS=kv_heads, num_warps=8, **shared,
    )  # fmt: skip
