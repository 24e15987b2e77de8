"""A process that compiles the kernels of attention, router and experts for sm_90 with no GPU at
hand, and prints room and head size, name, registers' spills in bytes, shared memory, and whether
the front end wrote checks of overflow. Nothing runs.

Of a kernel's schedules those with the largest tiles are compiled, since they need most registers
and most shared memory."""

import subprocess
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.attention.backward_triton import attention_bwd
from rl_consistency.kernels.attention.forward_triton import attention_fwd
from rl_consistency.kernels.attention.layout import SharedRun
from rl_consistency.kernels.attention.paged_cache_triton import HeadNorms, paged_inputs_fwd
from rl_consistency.kernels.attention.schedules import DECODE_LAST, Cut
from rl_consistency.kernels.core.launch import Remembered
from rl_consistency.kernels.experts import fold_triton, pairs_triton
from rl_consistency.kernels.experts.products_triton import gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.route import candidates, choose_fwd, logits_bwd
from rl_consistency.kernels.experts.schedules import (
    COMBINE,
    block_experts,
    block_rows,
    fold_candidates,
    pair_candidates,
    product_candidates,
)
from tests.kernels.attention.layouts import packed, paged

SHARED = 227 << 10
ANSWERS = {
    "has_tma": lambda device: True,
    "has_wgmma": lambda device: True,
    "sm_count": lambda device: 132,
    "shared_memory": lambda device: SHARED,
}
"""What an H100 would say."""

H100 = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
)
BF16 = torch.bfloat16
EXPERTS, TOP_K, ROWS, HIDDEN, WIDTH = 128, 8, 512, 2048, 768


def compile_only():
    """From now on a launch compiles, and its kernel is kept in the list."""
    found, run = [], JITFunction.run

    def compiled(self, *args, **options):
        kernel = run(self, *args, **(options | {"warmup": True}))
        found.append((self.__name__, kernel))
        return kernel

    driver.set_active(H100)
    JITFunction.run = compiled
    Remembered.launch = lambda self, grid, *args, **named: self.kernel[grid](*args, **named)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("rl_consistency"):
            for name in ANSWERS.keys() & vars(module).keys():
                setattr(module, name, ANSWERS[name])
    return found


def attention_calls(dim):
    """One call of each kernel of attention, for heads of a size."""
    q, keys = (torch.zeros(512, n, dim, dtype=BF16) for n in (12, 2))
    layout, lse = packed([256, 256]), torch.zeros(512, 12)
    yield partial(attention_fwd, q, keys, keys, layout, 0.1, None)
    yield partial(attention_bwd, q, q, keys, keys, q, lse, layout, 0.1, None)
    cos = torch.zeros(512, dim // 2)
    cache = torch.zeros(32, 16, 2, dim, dtype=BF16)
    norms = HeadNorms(q[0, 0], q[0, 0], 1e-6, 1e-6)
    yield partial(paged_inputs_fwd, q, keys, keys, cos, cos, norms, cache, cache, torch.arange(512))
    flat = torch.zeros(132 * 16, 2, dim, dtype=BF16)
    alone = partial(attention_fwd, q[:4], flat, flat, paged([2100] * 4), 0.1, None)
    yield from (alone, partial(alone, schedule=DECODE_LAST, cut=Cut(3, 30)))
    shared = paged([2100] * 256, shared_runs=[SharedRun(8 * i, 8, 2048) for i in range(32)])
    yield partial(attention_fwd, q[:256], flat, flat, shared, 0.1, None)


def largest(schedules, size):
    """Those of each kind (pointers or descriptors) with the largest tiles."""
    kinds = {schedule.kind for schedule in schedules}
    most = {kind: max(size(s) for s in schedules if s.kind == kind) for kind in kinds}
    return [s for s in schedules if size(s) == most[s.kind]]


def largest_products(product):
    return largest(
        product_candidates(product, BF16, tma=True), lambda s: s.tall.block_m * s.tall.block_n
    )


def expert_calls():
    """One call of each kernel of experts."""
    x, down = torch.empty(ROWS, HIDDEN, dtype=BF16), torch.empty(EXPERTS, HIDDEN, WIDTH, dtype=BF16)
    ids = torch.zeros(ROWS, TOP_K, dtype=torch.int32)
    first, pairs = torch.zeros(EXPERTS + 1, dtype=torch.int32), ids.flatten()
    gate_up = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=BF16)
    activated, both, outputs = (
        torch.empty(len(pairs), n, dtype=BF16) for n in (WIDTH, 2 * WIDTH, HIDDEN)
    )
    weights = torch.zeros(ROWS, TOP_K)
    for schedule in largest_products("nt"):
        for layout, by_row, a in (("nt", False, activated), ("nn", True, x)):
            yield partial(product_fwd, a, down, layout, first, pairs, TOP_K, by_row, schedule)
    for schedule in largest_products("gate_up"):
        yield partial(gate_up_fwd, x, gate_up, first, pairs, TOP_K, "silu", True, schedule)
    buffer = torch.zeros(1).expand(EXPERTS, 2 * WIDTH, HIDDEN)
    for schedule in largest(fold_candidates(BF16, tma=True), lambda s: s.block_n * s.block_k):
        tables = pairs, pairs, first, False, False
        yield partial(fold_triton.fold_runs, buffer, both, x, *tables, schedule=schedule)
    for schedule in (COMBINE[0], COMBINE[-1]):
        yield partial(pairs_triton.combine_fwd, outputs, ids, weights, schedule)
        for top_k in (TOP_K, 1):
            yield partial(pairs_triton.gather_rows, x, pairs, first, top_k, schedule)
        yield partial(pairs_triton.activate_pairs, both, first, "silu", schedule)
    schedule = pair_candidates(WIDTH)[0]
    yield partial(pairs_triton.pair_bwd, both, activated, weights, first, pairs, "silu", schedule)


def routing_calls(experts=512):
    """The kernels that know no dtype of operands."""
    numbers, ids = torch.zeros(64, dtype=torch.int32), torch.zeros(ROWS, TOP_K, dtype=torch.int32)
    for rows in (16, ROWS):
        yield partial(pairs_triton.expert_pairs_op, ids[:rows], numbers, numbers, experts)
    size = {"ROWS": block_rows(experts), "BLOCK_E": block_experts(experts), "TOP_K": TOP_K}
    count, place = fold_triton.count_runs_kernel, fold_triton.place_runs_kernel
    yield partial(count[(1,)], numbers, ids, numbers, experts, **size, num_warps=8)
    tables = numbers, ids, ids, numbers, numbers, numbers
    yield partial(place[(1,)], *tables, experts, **size, num_warps=8)
    logits, weights = torch.zeros(ROWS, experts), torch.zeros(ROWS, TOP_K)
    schedule = candidates(block_experts(experts))[-1]
    for p in (None, logits):
        yield partial(choose_fwd, logits, TOP_K, p is None, schedule)
        yield partial(logits_bwd, weights, ids, weights, p, experts, BF16, schedule)


def spilled(kernel):
    """Bytes of a thread's stack."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        )
    text = shown.stdout + shown.stderr
    return int(text.rpartition("STACK:")[2].split()[0])


if __name__ == "__main__":
    compiled = compile_only()
    # Heads that do not fill their columns and wide ones: forward and backward differ by size.
    calls = [(f"attention-{dim}", islice(attention_calls(dim), n))
             for dim, n in ((128, None), (80, 2), (256, 2))]  # fmt: skip
    for room, made in [*calls, ("experts", expert_calls()), ("experts", routing_calls())]:
        before = len(compiled)
        for call in made:
            call()
        for name, kernel in compiled[before:]:
            checks = kernel.metadata.sanitize_overflow
            print(room, name, spilled(kernel), kernel.metadata.shared, checks)
