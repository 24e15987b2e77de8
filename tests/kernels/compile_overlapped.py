"""A process that compiles every kernel whose launch overlaps the kernel ahead for sm_90, with no
GPU at hand, and prints name, whether it waits for that kernel, and how often it loads, copies,
writes, prefetches and lets the next kernel start before. Nothing runs."""

import torch

from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    PagedAttention,
    SequenceTables,
    SharedRun,
    SharedTables,
)
from rl_consistency.kernels.attention.paged_cache_triton import HeadNorms, paged_inputs_fwd
from rl_consistency.kernels.attention.schedules import DECODE_LAST, Cut
from rl_consistency.kernels.experts.pairs_triton import combine_fwd, expert_pairs_op
from rl_consistency.kernels.experts.products_triton import gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.route import choose_fwd
from rl_consistency.kernels.experts.schedules import COMBINE
from rl_consistency.kernels.linear.few_rows_triton import gate_up_glu_fwd, qkv_fwd
from rl_consistency.kernels.linear.schedules import GATE_UP, QKV
from rl_consistency.kernels.matmul.product_triton import matmul_fwd
from rl_consistency.kernels.matmul.schedules import DESCRIBED
from rl_consistency.kernels.pointwise.glu import glu_fwd
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_fwd
from tests.kernels.compile_for_sm90 import compile_only

BF16 = torch.bfloat16
WAIT = "griddepcontrol.wait"
BEFORE = {
    "loads": ("ld.global",),
    "copies": ("cp.async",),
    "writes": ("st.global", "atom.", "red."),
    "prefetches": ("prefetch.global.L2",),
    "releases": ("griddepcontrol.launch_dependents",),
}


def expert_calls(x):
    """One call of each kernel of experts, in blocks of rows and in one."""
    ids, first = torch.zeros(4096, 8, dtype=torch.int32), torch.zeros(129, dtype=torch.int32)
    pairs, gate_up = ids[:16].flatten(), torch.zeros(128, 1536, 896, dtype=BF16)
    yield lambda: choose_fwd(torch.zeros(16, 128), 8, True)
    yield lambda: expert_pairs_op(ids, first, first, 8)
    yield lambda: gate_up_fwd(x, gate_up, first, pairs, 8, "silu", False)
    yield lambda: product_fwd(x, gate_up, "nt", first, pairs, 8, True)
    yield lambda: combine_fwd(x.repeat(8, 1), ids[:16], ids[:16].float(), COMBINE[0])


def layouts():
    """256 sequences of 2,100 keys as a CUDA graph has them, alone and in groups of eight; and
    groups as an eager call has them."""
    blocks, slots = torch.zeros(256, 132, dtype=torch.int32), torch.zeros(256, dtype=torch.int64)
    ones, starts = torch.ones(256, dtype=torch.int32), torch.arange(256, dtype=torch.int32)
    cache = {"slot_mapping": slots, "key_cache": [], "value_cache": [], "block_size": 16}
    runs = [SharedRun(8 * i, 8, 2048) for i in range(32)]
    shared = SharedTables(torch.zeros(32, 3, dtype=torch.int32), 2048 * ones)
    captured = [
        CapturedPagedAttention.of(
            SequenceTables(starts, ones, 2100 * ones, blocks, found),
            queries=1, capacity=2100, **cache,
        )
        for found in (None, shared)
    ]  # fmt: skip
    grouped = PagedAttention(
        query_starts=range(256),
        query_lens=[1] * 256,
        context_lens=[2100] * 256,
        block_tables=blocks.tolist(),
        shared_runs=runs,
        **cache,
    )
    return *captured, grouped


def calls():
    """One call of each kernel."""
    x, w, narrow = (torch.zeros(n, 896, dtype=BF16) for n in (16, 4864, 128))
    yield lambda: qkv_fwd(x, w, narrow, narrow, None, None, None, QKV[0])
    for kind in ("tma", "pointer"):
        schedule = next(s for s in GATE_UP if s.kind == kind)
        yield lambda schedule=schedule: gate_up_glu_fwd(x, w, w, "silu", schedule)
    overlapped = next(s for s in DESCRIBED if s.overlap)
    yield lambda: matmul_fwd(x, w, None, "nt", BF16, overlapped)
    yield lambda: rms_norm_fwd(x, x, x[0], 1e-6)
    yield lambda: glu_fwd(w, w, "silu")
    yield from expert_calls(x)
    q, keys = (torch.zeros(256, n, 128, dtype=BF16) for n in (12, 2))
    cos, slots = torch.zeros(256, 64), torch.arange(256)
    norms = HeadNorms(q[0, 0], q[0, 0], 1e-6, 1e-6)
    cache = torch.zeros(32, 16, 2, 128, dtype=BF16)
    yield lambda: paged_inputs_fwd(q, keys, keys, cos, cos, norms, cache, cache, slots)
    flat = torch.zeros(132 * 16, 2, 128, dtype=BF16)
    alone, shared, grouped = layouts()
    plan = {"schedule": DECODE_LAST, "cut": Cut(3, 1200)}
    yield lambda: attention_fwd(q, flat, flat, alone, 0.1, None, **plan)
    yield lambda: attention_fwd(q[..., :80], flat[..., :80], flat[..., :80], alone, 0.1, 512)
    yield lambda: attention_fwd(q, flat, flat, shared, 0.1, None)
    yield lambda: attention_fwd(q, flat, flat, grouped, 0.1, None)


if __name__ == "__main__":
    compiled = compile_only()
    for call in calls():
        call()
    for name, kernel in compiled:
        if kernel.metadata.launch_pdl:
            before, waits, _ = kernel.asm["ptx"].partition(WAIT)
            counts = (sum(map(before.count, named)) for named in BEFORE.values())
            print(name, len(waits), *counts)
