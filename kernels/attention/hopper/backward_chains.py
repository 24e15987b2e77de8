"""The chains of dq on their way through memory, for `attention_backward_hopper`.

dq of a tile of queries is one chain of matrix steps over keys upward. Between two tiles of keys its
fp32 sums lie in memory: the copy engine fetches them as soon as the keys before have left them, and
sends them on behind the products that follow. A counter per tile of queries and head says how many
tiles of keys have left theirs. Memory keeps fp32 exactly.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_consistency.kernels.attention.hopper.backward_producer import (
    KEYS,
    QUERIES,
    STAGES,
    step_at,
    tiles_before,
    walk,
)
from rl_consistency.kernels.attention.layout import PackedSequences

ROW = gl.constexpr(256)
"""fp32 sums in a row of the chains as the copy engine sees them."""


def chain_bytes(layout: PackedSequences, heads: int, head_dim: int) -> int:
    """Of dq's sums in fp32, tiles filled up; none where one tile of keys holds every sequence."""
    if max(layout.query_lens, default=0) <= KEYS.value:
        return 0
    tiles = sum(-(-n // QUERIES.value) for n in layout.query_lens)
    return 4 * tiles * QUERIES.value * heads * head_dim


def empty_chains(
    layout: PackedSequences, heads: int, head_dim: int, device: torch.device
) -> tuple[Tensor, TensorDescriptor]:
    """Memory for the chains, [heads * tiles * QUERIES * head_dim / ROW, ROW] fp32, and its
    descriptor, whose box is a tile."""
    box = [QUERIES.value * head_dim // ROW.value, ROW.value]
    # A descriptor describes something, though nothing is read where no chain is carried on.
    rows = max(chain_bytes(layout, heads, head_dim) // (4 * ROW.value), box[0])
    chains = torch.empty(rows, ROW.value, dtype=torch.float32, device=device)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return chains, TensorDescriptor(chains, [rows, ROW.value], [ROW.value, 1], box, plain)


@gluon.constexpr_function
def chain_layout(dim):
    """[QUERIES, dim] sums in shared memory as the matrix units hold them: the four of a thread in
    two rows and two columns side by side, those of a warp behind one another."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    bases += [[0, 1 << i] for i in range(3, (dim // 2).bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[16, 0], [32, 0], [0, dim // 2]])


@gluon.jit
def _until(counter, count):
    """Wait until a counter has reached a number. What other programs' copy engines had written
    before they counted, this one's may then read."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred short;
        again:
        ld.acquire.gpu.global.s32 $0, [$1];
        setp.lt.s32 short, $0, $2;
        @short bra again;
        fence.proxy.async.global;
        }""",
        "=&r,l,r", [counter, count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _prefetch(place, size):
    """Bring `size` bytes into the second-level cache."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [place, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_chains(
    CHAINS, chain_desc, in_buf, counters, ready, gone, programs, first_tiles, query_start,
    query_len, window, num_tiles, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Wait until the keys before these have left dq of each tile of queries, and fetch it."""
    SIZE: gl.constexpr = QUERIES * DIM
    _head, first_key, _row, _limit, first_tile, per_head = walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        _head, ahead, tile, _slot, _turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        before = tiles_before(first_key, ahead, window, WINDOWED)
        _until(counters + tile, before)
        if before > 0:
            _prefetch(CHAINS + tile.to(gl.int64) * SIZE, before * 0 + SIZE * 4)
        # The step before has sent its own by then, and so has used this buffer and barrier.
        last = step + STAGES - 1
        mbarrier.wait(gone.index(last % STAGES), (last // STAGES) & 1 ^ 1)
        if before > 0:
            mbarrier.expect(ready, SIZE * 4)
            at = [tile * (SIZE // ROW), 0]
            tma.async_copy_global_to_shared(chain_desc, at, ready, in_buf)
        else:
            mbarrier.arrive(ready, count=1)


@gluon.jit
def leave_chains(
    chain_desc, out_buf, counters, gone, free, programs, first_tiles, query_start, query_len,
    window, num_tiles, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Send dq of each tile of queries to memory, and count it."""
    _head, first_key, _row, _limit, first_tile, per_head = walk(
        programs, first_tiles, query_start, query_len, window, num_tiles, GROUP, WINDOWED
    )
    for step in range(GROUP * per_head):
        _head, ahead, tile, slot, turn = step_at(step, first_key, first_tile, per_head, num_tiles)
        mbarrier.wait(gone.index(slot), turn)
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
