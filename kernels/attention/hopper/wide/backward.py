"""The backward pass on sm_90 for heads of 129 to 256, with specialised warps: one kernel for dq
(`dq`), one for dk and dv (`dkv`).

One kernel for all (`hopper/backward.py`) would pass the sums of dq through memory after every 64
keys, since the sums of dk and dv for more would not fit the registers: twice the bytes of its
operands. So scores are computed twice, as `backward_triton` does, and the bits are the same.
"""

from __future__ import annotations

from rl_consistency.kernels.attention.hopper.backward import statistics_of
from rl_consistency.kernels.attention.hopper.tiles import OPTIONS, head_descriptor
from rl_consistency.kernels.attention.hopper.wide.dkv import attention_wide_dkv_kernel
from rl_consistency.kernels.attention.hopper.wide.dq import attention_wide_dq_kernel
from rl_consistency.kernels.attention.schedules import SEVEN_PRODUCTS, padded
from rl_consistency.kernels.attention.tiles_triton import BackwardCall


def attention_wide_bwd(call: BackwardCall) -> None:
    """Fill dq, dk and dv."""
    do, q, k, v, dq, dk, dv = call.do, call.q, call.k, call.v, call.dq, call.dk, call.dv
    heads, dim, device, rows = q.shape[1], padded(call.head_dim), q.device, SEVEN_PRODUCTS.rows
    stat_tiles, first_tiles = call.layout.query_tiles(device, rows)
    statistics, _counters = statistics_of(do, call.out, call.lse, call.layout, rows)
    q_desc, do_desc, k_desc, v_desc = (head_descriptor(x, rows, 1, dim) for x in (q, do, k, v))
    numbers = (
        first_tiles, call.tables.query_start, call.tables.query_len, call.reach, len(stat_tiles),
        call.factor, call.scale, *k.stride()[:2], *v.stride()[:2],
    )  # fmt: skip
    shared = {
        "GROUP": call.group,
        "HEAD_DIM": call.head_dim,
        "DIM": dim,
        "WINDOWED": call.windowed,
        "maxnreg": 168,
        **OPTIONS,
    }
    tiles = call.layout.tiles(device, 1, 2 * rows)
    attention_wide_dq_kernel[(len(tiles) * heads,)](
        k, v, statistics, dq, q_desc, do_desc, k_desc, v_desc, tiles, *numbers, *dq.stride()[:2],
        HEADS=heads, num_warps=4, **shared,
    )  # fmt: skip
    tiles = call.layout.key_tiles(device, SEVEN_PRODUCTS.keys)
    attention_wide_dkv_kernel[(len(tiles) * call.kv_heads,)](
        k, v, statistics, dk, dv, q_desc, do_desc, tiles, *numbers, *dk.stride()[:2],
        *dv.stride()[:2], KV_HEADS=call.kv_heads, num_warps=8, **shared,
    )  # fmt: skip
