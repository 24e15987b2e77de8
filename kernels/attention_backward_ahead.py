"""The backward attention order on sm_90 in five products, with the next step's scores begun early.

The programs, chains and counters of `attention_backward_hopper`; another way through a step:

- scores of the next step are begun behind this step's products, so that the matrix units have work
  while dq leaves (`Variant.ahead`);
- dq so far is fetched by the copy engine as soon as the keys before have left it (`fetched`), or
  at least brought into the second-level cache;
- dq leaves through shared memory and the copy engine (`left`), or by stores of the consumers;
- dq is made before dk, so that it leaves under dk's product (`first`), or after.

None of them moves an operation of a sum: the same bytes as every other schedule. A program's keys
come from a table, in which a sequence's tiles of one KV head lie upward: whoever waits, waits for a
program of a lower id.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

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

from rl_consistency.kernels.attention_backward_hopper import (
    KEYS,
    QUERIES,
    _load_chain,
    _own_place,
    _probabilities,
    _product,
    _rows,
    _store_chain,
    _tiles_before,
    _write,
    chain_bytes,
)
from rl_consistency.kernels.attention_hopper import boxed_layout
from rl_consistency.kernels.attention_layout import PackedSequences
from rl_consistency.kernels.attention_statistics import statistics_of
from rl_consistency.kernels.cuda_device import sm_count

ROW = gl.constexpr(256)
"""fp32 sums in a row of the chains as the copy engine sees them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a step runs; every field is neutral to the bits."""

    ahead: bool = True
    """Whether the next step's scores are begun before this one's dq leaves."""
    fetched: bool = False
    """Whether dq so far comes through shared memory, by the copy engine."""
    left: bool = False
    """Whether dq leaves through shared memory, by the copy engine."""
    first: bool = False
    """Whether dq is made before dk."""
    stages: int = 2
    """Tiles of queries in shared memory at a time; at 128 columns, no 3 beside both chains."""
    spread: float = 1.25
    """How far sequences and KV heads are set apart in the order of programs (`tiles_apart`)."""


ADOPTED = Variant()


@gluon.jit
def _walk(
    programs, first_tiles, query_start, query_len, window, num_tiles, GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """(KV head, first key, the sequence's first row and length, number of its first tile for the
    group's first head, tiles of queries per head) of a program."""
    entry = programs + 3 * gl.program_id(0)
    sequence = gl.load(entry)
    first_key = gl.load(entry + 1)
    kv_head = gl.load(entry + 2)
    limit = gl.load(query_len + sequence)
    first_tile = kv_head * GROUP * num_tiles + gl.load(first_tiles + sequence)
    high = limit
    if WINDOWED:
        high = gl.minimum(limit, first_key + KEYS - 1 + window)
    per_head = gl.cdiv(high - first_key, QUERIES)
    return kv_head, first_key, gl.load(query_start + sequence), limit, first_tile, per_head


@gluon.jit
def _step(step, first_key, first_tile, per_head, num_tiles, STAGES: gl.constexpr):
    """(head of the group, first query after the first key, number of the tile, slot, turn) of a
    step: over the group's heads upward, then queries upward."""
    head = step // per_head
    ahead = step % per_head * QUERIES
    tile = first_tile + head * num_tiles + (first_key + ahead) // QUERIES
    return head, ahead, tile, step % STAGES, (step // STAGES) & 1


@gluon.jit
def _copy(
    q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done, programs,
    first_tiles, query_start, query_len, window, num_tiles, GROUP: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring of query tiles: q, do, and the two statistics of each query."""
    lane = gl.arange(0, QUERIES, layout=gl.BlockedLayout([2], [32], [1], [0]))
    kv_head, first_key, start_row, _limit, first_tile, per_head = _walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        head, ahead, tile, slot, turn = _step(
            step, first_key, first_tile, per_head, num_tiles, STAGES
        )
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


@gluon.constexpr_function
def _await_asm(fetched):
    """PTX: until a counter has reached a number. What other programs have written before they
    counted, this one's copy engine may then read, if it is to."""
    lines = [
        ".reg .pred short;",
        "again:",
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "setp.lt.s32 short, $0, $2;",
        "@short bra again;",
    ]
    fence = ["fence.proxy.async.global;"] if fetched else []
    return "{\n" + "\n".join(lines + fence) + "\n}"


@gluon.jit
def _await(
    CHAINS, chain_desc, in_buf, counters, ready, gone, programs, first_tiles, query_start,
    query_len, window, num_tiles, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
    FETCHED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Wait until the keys before these have left dq of each tile of queries, and fetch it."""
    SIZE: gl.constexpr = QUERIES * DIM
    _head, first_key, _row, _limit, first_tile, per_head = _walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        _head, ahead, tile, _slot, _turn = _step(
            step, first_key, first_tile, per_head, num_tiles, STAGES
        )
        before = _tiles_before(first_key, ahead, window, WINDOWED)
        gl.inline_asm_elementwise(
            _await_asm(FETCHED), "=&r,l,r", [counters + tile, before], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        if before > 0:
            gl.inline_asm_elementwise(
                """{
                .reg .pred one;
                elect.sync _|one, 0xffffffff;
                @one cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.b32 $0, 0;
                }""",
                "=r,l,r", [CHAINS + tile.to(gl.int64) * SIZE, before * 0 + SIZE * 4],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        # The step before has had its own by then, and so has used this buffer and barrier.
        last = step + STAGES - 1
        mbarrier.wait(gone.index(last % STAGES), (last // STAGES) & 1 ^ 1)
        if FETCHED and before > 0:
            mbarrier.expect(ready, SIZE * 4)
            at = [tile * (SIZE // ROW), 0]
            tma.async_copy_global_to_shared(chain_desc, at, ready, in_buf)
        else:
            mbarrier.arrive(ready, count=1)


@gluon.jit
def _leave(
    chain_desc, out_buf, counters, gone, free, programs, first_tiles, query_start, query_len,
    window, num_tiles, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
    LEFT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Send dq of each tile of queries to memory, if it lies in shared memory, and count it."""
    _head, first_key, _row, _limit, first_tile, per_head = _walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        _head, ahead, tile, slot, turn = _step(
            step, first_key, first_tile, per_head, num_tiles, STAGES
        )
        mbarrier.wait(gone.index(slot), turn)
        if LEFT:
            # Nobody waits for what the last keys have rounded.
            if ahead >= KEYS:
                at = [tile * (QUERIES * DIM // ROW), 0]
                tma.async_copy_shared_to_global(chain_desc, at, out_buf)
                tma.store_wait(0)
                gl.thread_barrier()
                mbarrier.arrive(free, count=1)
                # Read is not yet written: the count is for what others can see.
                gl.inline_asm_elementwise(
                    "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r,r",
                    [step], dtype=gl.int32, is_pure=False, pack=1,
                )  # fmt: skip
                gl.thread_barrier()
                gl.atomic_add(counters + tile, 1, sem="release", scope="gpu")
            else:
                mbarrier.arrive(free, count=1)
        else:
            mbarrier.arrive(free, count=1)
            if ahead >= KEYS:
                gl.atomic_add(counters + tile, 1, sem="release", scope="gpu")


@gluon.constexpr_function
def _chain_layout(dim):
    """Shared memory in the order of `_own_place`: a thread's sums of a tile 16 bytes at a time."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    bases += [[0, 1 << i] for i in range(3, (dim // 2).bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[16, 0], [32, 0], [0, dim // 2]])


@gluon.jit
def _zero(step):
    """0, of which the compiler does not know that it is the same at every step: what is derived
    from it is worked out again instead of being kept in registers that a step does not have."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _next_scores(
    k_buf, q_bufs, full, step, steps, S: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Begin the scores of the step after this one. After the last there is nothing to begin: its
    own again, for nobody, since a branch would cost every step."""
    after = gl.minimum(step + 1, steps - 1)
    mbarrier.wait(full.index(after % STAGES), (after // STAGES) & 1)
    return _product(k_buf, q_bufs.index(after % STAGES), S)


@gluon.jit
def _send(
    dQ, CHAINS, out_buf, free, dq, step, ahead, tile, place, first_key, start_row, head,
    limit, scale, stride_dqt, stride_dqh, DIM: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Let dq of a step go: rounded after the last keys, or to memory for the keys that follow."""
    mbarrier.wait(free, step & 1 ^ 1)
    if ahead < KEYS:
        _write(
            dQ, dq * scale + 0.0, first_key + ahead, start_row, head, limit, stride_dqt,
            stride_dqh, DIM,
        )  # fmt: skip
    elif LEFT:
        view = out_buf._reinterpret(gl.float32, [QUERIES, DIM], _chain_layout(DIM))
        view.store(dq)
        fence_async_shared()
    else:
        chain = CHAINS + tile.to(gl.int64) * (QUERIES * DIM) + place
        _store_chain(chain.to(gl.int64), dq, DIM)


@gluon.jit
def _consume(
    K, V, dQ, dK, dV, CHAINS, q_bufs, do_bufs, lse_buf, delta_buf, k_bufs, v_bufs, ds_bufs, in_buf,
    out_buf, full, done, ready, gone, free, programs, first_tiles, query_start, query_len,
    window, num_tiles, factor, scale, stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt,
    stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh, GROUP: gl.constexpr,
    DIM: gl.constexpr, WINDOWED: gl.constexpr, AHEAD: gl.constexpr, FETCHED: gl.constexpr,
    LEFT: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The five products of each step, and the chains of dq from and to memory."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DIM, 16])
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = ds_bufs.dtype
    kv_head, first_key, start_row, limit, first_tile, per_head = _walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    k_bufs.index(0).store(_rows(K, first_key, start_row, kv_head, limit, stride_kt, stride_kh, DIM))
    v_bufs.index(0).store(_rows(V, first_key, start_row, kv_head, limit, stride_vt, stride_vh, DIM))
    fence_async_shared()
    gl.thread_barrier()
    dk = gl.zeros([KEYS, DIM], gl.float32, D)
    dv = gl.zeros([KEYS, DIM], gl.float32, D)
    steps = GROUP * per_head
    if AHEAD:
        mbarrier.wait(full.index(0), 0)
        coming = warpgroup_mma_wait(0, deps=[_product(k_bufs.index(0), q_bufs.index(0), S)])
    for step in range(steps):
        head, ahead, tile, slot, turn = _step(
            step, first_key, first_tile, per_head, num_tiles, STAGES
        )
        q_buf, do_buf = q_bufs.index(slot), do_bufs.index(slot)
        zero = _zero(step)
        place = _own_place(DIM, C) + zero
        k_buf, v_buf, ds_buf = k_bufs.index(zero), v_bufs.index(zero), ds_bufs.index(zero)
        if AHEAD:
            scores = coming
            dp = _product(v_buf, do_buf, S)
            lse = lse_buf.index(slot).load(columns)
        else:
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
        begun = _tiles_before(first_key, ahead, window, WINDOWED) > 0
        mbarrier.wait(ready, step & 1)
        if FETCHED:
            view = in_buf._reinterpret(gl.float32, [QUERIES, DIM], _chain_layout(DIM))
            dq = gl.where(begun, view.load(C), 0.0)
        else:
            chain = (CHAINS + tile.to(gl.int64) * (QUERIES * DIM) + place).to(gl.int64)
            dq = _load_chain(gl.where(begun, chain, 0), DIM)
        ds_buf.store(ds)
        fence_async_shared()
        if not FIRST:
            dk = warpgroup_mma(gl.convert_layout(ds, operand), q_buf, dk, is_async=True)
        gl.thread_barrier()
        dq = warpgroup_mma(ds_buf.permute([1, 0]), k_buf, dq, is_async=True)
        if FIRST:
            dk = warpgroup_mma(gl.convert_layout(ds, operand), q_buf, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
        else:
            # Of dv there is little left; done, it returns the registers of its operand.
            dv = warpgroup_mma_wait(2, deps=[dv])
            if AHEAD:
                begun_scores = _next_scores(k_buf, q_bufs, full, step, steps, S, STAGES)
            dq, dk = warpgroup_mma_wait(AHEAD, deps=[dq, dk])
        _send(
            dQ, CHAINS, out_buf, free, dq, step, ahead, tile, place, first_key, start_row,
            kv_head * GROUP + head, limit, scale, stride_dqt, stride_dqh, DIM, LEFT,
        )  # fmt: skip
        # The compiler puts barriers of the warps around every arrival: the fewer the better, and
        # where the matrix units have work in the meantime.
        if FIRST:
            if AHEAD:
                begun_scores = _next_scores(k_buf, q_bufs, full, step, steps, S, STAGES)
            gl.thread_barrier()
            mbarrier.arrive(gone.index(slot), count=1)
            dk = warpgroup_mma_wait(AHEAD, deps=[dk])
        gl.thread_barrier()
        mbarrier.arrive(done.index(slot), count=1)
        if AHEAD:
            gl.thread_barrier()
            coming = warpgroup_mma_wait(0, deps=[begun_scores])
    _write(dK, dk * scale + 0.0, first_key, start_row, kv_head, limit, stride_dkt, stride_dkh, DIM)
    _write(dV, dv + 0.0, first_key, start_row, kv_head, limit, stride_dvt, stride_dvh, DIM)


@gluon.jit(
    do_not_specialize=["programs", "first_tiles", "query_start", "query_len", "window", "num_tiles"]
)
def attention_backward_ahead_kernel(
    K, V, dQ, dK, dV, CHAINS, STATISTICS, counters, q_desc, do_desc, chain_desc, programs,
    first_tiles, query_start, query_len, window, num_tiles, factor, scale,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt, stride_dkh,
    stride_dvt, stride_dvh, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
    AHEAD: gl.constexpr, FETCHED: gl.constexpr, LEFT: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """All gradients that one tile of keys of one KV head gives."""
    dtype: gl.constexpr = q_desc.dtype
    owned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    staged: gl.constexpr = [QUERIES * DIM // ROW, ROW]
    unused: gl.constexpr = [1, ROW]
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, DIM], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, DIM], do_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [1, KEYS, DIM], owned)
    v_bufs = gl.allocate_shared_memory(dtype, [1, KEYS, DIM], owned)
    ds_bufs = gl.allocate_shared_memory(
        dtype, [1, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    )
    in_buf = gl.allocate_shared_memory(gl.float32, staged if FETCHED else unused, chain_desc.layout)
    out_buf = gl.allocate_shared_memory(gl.float32, staged if LEFT else unused, chain_desc.layout)
    lse_buf = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], flat)
    delta_buf = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    gone = done
    if FIRST:
        # dq of a step goes before the step is done with its slot.
        gone = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(done.index(i), count=1)
        if FIRST:
            mbarrier.init(gone.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                K, V, dQ, dK, dV, CHAINS, q_bufs, do_bufs, lse_buf, delta_buf, k_bufs, v_bufs,
                ds_bufs, in_buf, out_buf, full, done, ready, gone, free, programs,
                first_tiles, query_start, query_len, window, num_tiles, factor, scale, stride_kt,
                stride_kh, stride_vt, stride_vh, stride_dqt, stride_dqh, stride_dkt, stride_dkh,
                stride_dvt, stride_dvh, GROUP, DIM, WINDOWED, AHEAD, FETCHED, LEFT, FIRST,
                STAGES,
            )),
            (_copy, (
                q_desc, do_desc, STATISTICS, q_bufs, do_bufs, lse_buf, delta_buf, full, done,
                programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, DIM,
                WINDOWED, STAGES,
            )),
            (_await, (
                CHAINS, chain_desc, in_buf, counters, ready, gone, programs, first_tiles,
                query_start, query_len, window, num_tiles, GROUP, DIM, WINDOWED, FETCHED, STAGES,
            )),
            (_leave, (
                chain_desc, out_buf, counters, gone, free, programs, first_tiles, query_start,
                query_len, window, num_tiles, GROUP, DIM, WINDOWED, LEFT, STAGES,
            )),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )  # fmt: skip


def tiles_apart(
    layout: PackedSequences, kv_heads: int, spread: float, multiprocessors: int
) -> float:
    """`spread` times the programs of one sequence and KV head that run at a time; 0 where fewer
    than two of them do, which do not wait for one another."""
    resident = multiprocessors / (len(layout.query_lens) * kv_heads)
    return spread * resident if resident >= 2 else 0.0


def attention_ahead_bwd(
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
    variant: Variant = ADOPTED,
) -> None:
    """Fill dq, dk and dv; the chains take `chain_bytes`."""
    heads, head_dim = q.shape[1:]
    kv_heads, device = k.shape[1], q.device
    dq, dk, dv = gradients
    tables = layout.tables(device)
    query_tiles, first_tiles = layout.query_tiles(device, QUERIES.value)
    num_tiles = len(query_tiles)
    statistics, counters = statistics_of(do, out, lse, layout, QUERIES.value)
    # A descriptor describes something, though nothing is read where no chain is carried on.
    rows = max(chain_bytes(layout, heads, head_dim) // (4 * ROW.value), ROW.value)
    chains = torch.empty(rows, ROW.value, dtype=torch.float32, device=device)
    box = [QUERIES.value, head_dim]
    boxed = boxed_layout(box, q.dtype)
    q_desc, do_desc = (
        TensorDescriptor(x, [x.shape[0], heads * head_dim], [x.stride(0), 1], box, boxed)
        for x in (q, do)
    )
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    tile = [QUERIES.value * head_dim // ROW.value, ROW.value]
    chain_desc = TensorDescriptor(chains, [rows, ROW.value], [ROW.value, 1], tile, plain)
    apart = tiles_apart(layout, kv_heads, variant.spread, sm_count(device))
    programs = layout.key_programs(device, KEYS.value, kv_heads, apart)
    attention_backward_ahead_kernel[(len(programs),)](
        k, v, dq, dk, dv, chains, statistics, counters, q_desc, do_desc, chain_desc, programs,
        first_tiles, tables.query_start, tables.query_len, reach, num_tiles, factor, scale,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), dq.stride(0), dq.stride(1),
        dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
        GROUP=heads // kv_heads, DIM=head_dim, WINDOWED=window is not None, AHEAD=variant.ahead,
        FETCHED=variant.fetched, LEFT=variant.left, FIRST=variant.first, STAGES=variant.stages,
        num_warps=8, maxnreg=168, enable_fp_fusion=False,
    )  # fmt: skip
