"""The backward attention order on sm_90 in five products: one schedule, with specialised warps.

A program owns 128 keys of one KV head, as `attention_dkv_kernel` does, and also carries dq on: dq
of a tile of queries is one chain of matrix steps over keys upward, so a program takes the fp32 sums
that the keys before its own have left in memory, continues them and leaves them to the next, or
rounds them if its keys are the last. A counter per tile of queries and head says how many tiles of
keys have been through. Memory keeps fp32 exactly: the bits of the two kernels of
`attention_backward_triton`, with scores computed once.

Tiles of keys that come earlier in a sequence have programs of lower ids (`key_tiles`), and devices
start programs in the order of their ids, without promising it: whoever waits, waits for a program
that runs already.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_consistency.kernels.attention_hopper import boxed_layout
from rl_consistency.kernels.attention_layout import PackedSequences
from rl_consistency.kernels.attention_statistics import statistics_of

KEYS = gl.constexpr(128)
QUERIES = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def _walk(
    tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """(KV head, first key, the sequence's first row and length, number of its first tile for the
    group's first head, tiles of queries per head) of a program."""
    kv_head = gl.program_id(0) % KV_HEADS
    index = gl.program_id(0) // KV_HEADS
    sequence = gl.load(tiles + 2 * index)
    first_key = gl.load(tiles + 2 * index + 1)
    limit = gl.load(query_len + sequence)
    first_tile = kv_head * GROUP * num_tiles + gl.load(first_tiles + sequence)
    high = limit
    if WINDOWED:
        high = gl.minimum(limit, first_key + KEYS - 1 + window)
    per_head = gl.cdiv(high - first_key, QUERIES)
    return kv_head, first_key, gl.load(query_start + sequence), limit, first_tile, per_head


@gluon.jit
def _step(step, first_key, first_tile, per_head, num_tiles):
    """(head of the group, first query after the first key, number of the tile, slot, turn) of a
    step: over the group's heads upward, then queries upward."""
    head = step // per_head
    ahead = step % per_head * QUERIES
    tile = first_tile + head * num_tiles + (first_key + ahead) // QUERIES
    return head, ahead, tile, step % STAGES, (step // STAGES) & 1


@gluon.jit
def _tiles_before(first_key, ahead, window, WINDOWED: gl.constexpr):
    """How many tiles of keys before this one the queries of a step see."""
    first = first_key * 0
    if WINDOWED:
        first = gl.maximum(first_key + ahead - window + 1, 0) // KEYS
    return first_key // KEYS - first


@gluon.jit
def _copy(
    q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done, tiles,
    first_tiles, query_start, query_len, window, num_tiles, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Fill the ring of query tiles: q, do, and the two statistics of each query."""
    lane = gl.arange(0, QUERIES, layout=gl.BlockedLayout([2], [32], [1], [0]))
    kv_head, first_key, start_row, _limit, first_tile, per_head = _walk(
        tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        head, ahead, tile, slot, turn = _step(step, first_key, first_tile, per_head, num_tiles)
        statistics = STATISTICS + tile.to(gl.int64) * (2 * QUERIES) + lane
        lse = gl.load(statistics)
        delta = gl.load(statistics + QUERIES)
        at = [start_row + first_key + ahead, (kv_head * GROUP + head) * DIM]
        mbarrier.wait(done.index(slot), turn ^ 1)
        mbarrier.expect(full.index(slot), 2 * QUERIES * DIM * 2)
        tma.async_copy_global_to_shared(q_desc, at, full.index(slot), q_bufs.index(slot))
        tma.async_copy_global_to_shared(do_desc, at, full.index(slot), do_bufs.index(slot))
        lse_buf.index(slot).store(lse)
        delta_buf.index(slot).store(delta)
        gl.thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _await(
    counters, ready, counted, tiles, first_tiles, query_start, query_len, window, num_tiles,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Wait until the keys before these have left dq of each tile of queries."""
    _head, first_key, _row, _limit, first_tile, per_head = _walk(
        tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        _head, ahead, tile, slot, turn = _step(step, first_key, first_tile, per_head, num_tiles)
        gl.inline_asm_elementwise(
            """{
            .reg .pred short;
            again:
            ld.acquire.gpu.global.s32 $0, [$1];
            setp.lt.s32 short, $0, $2;
            @short bra again;
            }""",
            "=&r,l,r", [counters + tile, _tiles_before(first_key, ahead, window, WINDOWED)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        # The step that had the slot must have been counted: nothing else holds the warps of a
        # program less than two turns apart from the one that counts.
        mbarrier.wait(counted.index(slot), turn ^ 1)
        gl.thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _count(
    counters, done, counted, tiles, first_tiles, query_start, query_len, window, num_tiles,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Count each tile of queries whose dq has been left."""
    _head, first_key, _row, _limit, first_tile, per_head = _walk(
        tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        _head, _ahead, tile, slot, turn = _step(step, first_key, first_tile, per_head, num_tiles)
        mbarrier.wait(done.index(slot), turn)
        gl.atomic_add(counters + tile, 1, sem="release", scope="gpu")
        mbarrier.arrive(counted.index(slot), count=1)


@gluon.jit
def _rows(X, first, start_row, head, limit, stride_t, stride_h, DIM: gl.constexpr):
    """128 rows of one head, zeros past the sequence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [8, 1], [1, 0])
    key = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    offset = (start_row + key).to(gl.int64) * stride_t + head * stride_h
    pointer = X + gl.expand_dims(offset, 1) + gl.expand_dims(dim, 0)
    mask = gl.expand_dims(key < limit, 1) & gl.expand_dims(dim < DIM, 0)
    return gl.load(pointer, mask=mask, other=0.0)


@gluon.jit
def _write(X, value, first, start_row, head, limit, stride_t, stride_h, DIM: gl.constexpr):
    """Store rows of one head that the sequence has, from a matrix layout."""
    layout: gl.constexpr = value.type.layout
    rows: gl.constexpr = value.shape[0]
    row = first + gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    offset = (start_row + row).to(gl.int64) * stride_t + head * stride_h
    pointer = X + gl.expand_dims(offset, 1) + gl.expand_dims(dim, 0)
    mask = gl.expand_dims(row < limit, 1) & gl.expand_dims(dim < DIM, 0)
    gl.store(pointer, value.to(X.dtype.element_ty), mask=mask)


@gluon.constexpr_function
def _load_asm(count):
    """PTX: a thread's `count` fp32 sums, 16 bytes at a time; zeros from a null pointer."""
    lines = [".reg .pred some;", f"setp.ne.u64 some, ${count}, 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(count)]
    for i in range(0, count, 4):
        group = ", ".join(f"${i + j}" for j in range(4))
        lines.append(f"@some ld.global.cg.v4.b32 {{{group}}}, [${count} + {i // 4 * 512}];")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _store_asm(count):
    """PTX: the same sums to the same places; the result, one byte each, is nothing."""
    pointer = count // 4
    lines = []
    for i in range(0, count, 4):
        group = ", ".join(f"${pointer + count + i + j}" for j in range(4))
        lines.append(f"st.global.v4.b32 [${pointer} + {i // 4 * 512}], {{{group}}};")
    return "\n".join(lines + [f"mov.b32 ${i}, 0;" for i in range(pointer)])


@gluon.constexpr_function
def _operands(outputs, pointers, values):
    return ",".join(["=r"] * outputs + ["l"] * pointers + ["r"] * values)


@gluon.jit
def _own_place(DIM: gl.constexpr, layout: gl.constexpr):
    """Where the elements that a thread holds of a tile's dq begin in memory, [QUERIES, DIM].

    The same for all elements of a thread: in memory they lie as the matrix units hold them.
    """
    row = gl.expand_dims(gl.arange(0, QUERIES, layout=gl.SliceLayout(1, layout)), 1)
    dim = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, layout)), 0)
    warp = dim // (DIM // 2) * 4 + row // 16
    return warp * (8 * DIM) + row % 8 * 16 + dim % 8 // 2 * 4


@gluon.jit
def _load_chain(place, DIM: gl.constexpr):
    """A tile's dq so far, past the first-level cache, or zeros where `place` is 0."""
    count: gl.constexpr = DIM // 4
    return gl.inline_asm_elementwise(
        _load_asm(count), _operands(count, count, 0), [place], dtype=gl.float32, is_pure=False,
        pack=count,
    )  # fmt: skip


@gluon.jit
def _store_chain(place, dq, DIM: gl.constexpr):
    count: gl.constexpr = DIM // 4
    gl.inline_asm_elementwise(
        _store_asm(count), _operands(count // 4, count, count), [place, dq], dtype=gl.int8,
        is_pure=False, pack=count,
    )  # fmt: skip


@gluon.jit
def _product(own, rows, S: gl.constexpr):
    """Begin own rows^T: [KEYS, QUERIES]."""
    nothing = gl.zeros([KEYS, QUERIES], gl.float32, S)
    return warpgroup_mma(own, rows.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(scores, lse, ahead, window, factor, WINDOWED: gl.constexpr):
    """exp2(scores * factor - lse), 0 where a query does not see a key. `ahead`: the tile's first
    query minus the program's first key."""
    S: gl.constexpr = scores.type.layout
    scores, shift = gl.broadcast(scores, -gl.expand_dims(lse, 0))
    p = gl.exp2(gl.fma(scores, gl.full_like(scores, factor), shift))
    # Query minus key, taken apart into what a thread has and constants: it costs no registers.
    key = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, S)), 1)
    query = gl.expand_dims(gl.arange(0, QUERIES, layout=gl.SliceLayout(0, S)), 0)
    own = key // 16 * 16 + key % 8 - query % 8 // 2 * 2
    rest = query // 8 * 8 + query % 2 - key // 8 % 2 * 8
    seen = rest >= own - ahead
    if WINDOWED:
        seen = seen & (rest < own - ahead + window)
    return gl.where(seen, p, 0.0)


@gluon.jit
def _consume(
    K, V, dQ, dK, dV, CHAINS, q_bufs, do_bufs, lse_buf, delta_buf, k_buf, v_buf, ds_buf, full,
    ready, done, tiles, first_tiles, query_start, query_len, window, num_tiles, factor, scale,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt, stride_dkh,
    stride_dvt, stride_dvh, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """The five products of each step, and the chains of dq from and to memory."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DIM, 16])
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = ds_buf.dtype
    kv_head, first_key, start_row, limit, first_tile, per_head = _walk(
        tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS, GROUP, WINDOWED
    )
    k_buf.store(_rows(K, first_key, start_row, kv_head, limit, stride_kt, stride_kh, DIM))
    v_buf.store(_rows(V, first_key, start_row, kv_head, limit, stride_vt, stride_vh, DIM))
    fence_async_shared()
    gl.thread_barrier()
    place = _own_place(DIM, C)
    dk = gl.zeros([KEYS, DIM], gl.float32, D)
    dv = gl.zeros([KEYS, DIM], gl.float32, D)
    for step in range(GROUP * per_head):
        head, ahead, tile, slot, turn = _step(step, first_key, first_tile, per_head, num_tiles)
        q_buf, do_buf = q_bufs.index(slot), do_bufs.index(slot)
        mbarrier.wait(full.index(slot), turn)
        scores = _product(k_buf, q_buf, S)
        dp = _product(v_buf, do_buf, S)
        lse = lse_buf.index(slot).load(columns)
        scores = warpgroup_mma_wait(1, deps=[scores])
        p = _probabilities(scores, lse, ahead, window, factor, WINDOWED)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), do_buf, dv, is_async=True)
        delta = gl.expand_dims(delta_buf.index(slot).load(columns), 0)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - delta)).to(dtype)
        # Chains that no earlier key has begun start from zero; the last keys' become dq.
        chain = (CHAINS + tile.to(gl.int64) * (QUERIES * DIM) + place).to(gl.int64)
        begun = _tiles_before(first_key, ahead, window, WINDOWED) > 0
        mbarrier.wait(ready.index(slot), turn)
        dq = _load_chain(gl.where(begun, chain, 0), DIM)
        ds_buf.store(ds)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q_buf, dk, is_async=True)
        gl.thread_barrier()
        dq = warpgroup_mma(ds_buf.permute([1, 0]), k_buf, dq, is_async=True)
        dq, dk, dv = warpgroup_mma_wait(0, deps=[dq, dk, dv])
        if ahead < KEYS:
            _write(
                dQ, dq * scale + 0.0, first_key + ahead, start_row, kv_head * GROUP + head, limit,
                stride_dqt, stride_dqh, DIM,
            )  # fmt: skip
        else:
            _store_chain(chain, dq, DIM)
        gl.thread_barrier()
        mbarrier.arrive(done.index(slot), count=1)
    _write(dK, dk * scale + 0.0, first_key, start_row, kv_head, limit, stride_dkt, stride_dkh, DIM)
    _write(dV, dv + 0.0, first_key, start_row, kv_head, limit, stride_dvt, stride_dvh, DIM)


@gluon.jit(
    do_not_specialize=["tiles", "first_tiles", "query_start", "query_len", "window", "num_tiles"]
)
def attention_backward_hopper_kernel(
    K, V, dQ, dK, dV, CHAINS, STATISTICS, counters, q_desc, do_desc, tiles, first_tiles,
    query_start, query_len, window, num_tiles, factor, scale,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt, stride_dkh,
    stride_dvt, stride_dvh, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """All gradients that one tile of keys of one KV head gives."""
    dtype: gl.constexpr = q_desc.dtype
    owned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, DIM], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, DIM], do_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [KEYS, DIM], owned)
    v_buf = gl.allocate_shared_memory(dtype, [KEYS, DIM], owned)
    ds_buf = gl.allocate_shared_memory(
        dtype, [KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    )
    lse_buf = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], flat)
    delta_buf = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    counted = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(counted.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                K, V, dQ, dK, dV, CHAINS, q_bufs, do_bufs, lse_buf, delta_buf, k_buf, v_buf,
                ds_buf, full, ready, done, tiles, first_tiles, query_start, query_len, window,
                num_tiles, factor, scale, stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt,
                stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh, KV_HEADS, GROUP, DIM,
                WINDOWED,
            )),
            (_copy, (
                q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done,
                tiles, first_tiles, query_start, query_len, window, num_tiles, KV_HEADS, GROUP,
                DIM, WINDOWED,
            )),
            (_await, (
                counters, ready, counted, tiles, first_tiles, query_start, query_len, window,
                num_tiles, KV_HEADS, GROUP, WINDOWED,
            )),
            (_count, (
                counters, done, counted, tiles, first_tiles, query_start, query_len, window,
                num_tiles, KV_HEADS, GROUP, WINDOWED,
            )),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )  # fmt: skip


def chain_bytes(layout: PackedSequences, heads: int, head_dim: int) -> int:
    """Of dq's sums in fp32, tiles filled up; none where one tile of keys holds every sequence."""
    if max(layout.query_lens, default=0) <= KEYS.value:
        return 0
    tiles = sum(-(-n // QUERIES.value) for n in layout.query_lens)
    return 4 * tiles * QUERIES.value * heads * head_dim


def attention_hopper_bwd(
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
    reach: int,
    factor: float,
) -> None:
    """Fill dq, dk and dv; the chains take `chain_bytes`."""
    heads, head_dim = q.shape[1:]
    kv_heads, device = k.shape[1], q.device
    dq, dk, dv = gradients
    tables = layout.tables(device)
    query_tiles, first_tiles = layout.query_tiles(device, QUERIES.value)
    num_tiles = query_tiles.shape[0]
    statistics, counters = statistics_of(do, out, lse, layout, QUERIES.value)
    chains = torch.empty(
        chain_bytes(layout, heads, head_dim) // 4, dtype=torch.float32, device=device
    )
    box = [QUERIES.value, head_dim]
    boxed = boxed_layout(box, q.dtype)
    q_desc, do_desc = (
        TensorDescriptor(x, [x.shape[0], heads * head_dim], [x.stride(0), 1], box, boxed)
        for x in (q, do)
    )
    key_tiles = layout.key_tiles(device, KEYS.value)
    attention_backward_hopper_kernel[(key_tiles.shape[0] * kv_heads,)](
        k, v, dq, dk, dv, chains, statistics, counters, q_desc, do_desc, key_tiles, first_tiles,
        tables.query_start, tables.query_len, reach, num_tiles, factor, scale,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), dq.stride(0), dq.stride(1),
        dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=head_dim, WINDOWED=window is not None,
        num_warps=8, maxnreg=168, enable_fp_fusion=False,
    )  # fmt: skip
