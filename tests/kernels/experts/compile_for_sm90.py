"""A process that compiles every kernel of router and experts for sm_90 with no GPU at hand, and
prints name, registers' spills in bytes and shared memory of each. Nothing runs.

Of a kernel's schedules for bf16 those with the largest tiles are compiled, since they need most
registers and most shared memory; with `all` in the command line every one is, for fp32 too."""

import sys
from functools import partial

import torch

from rl_consistency.kernels.experts.fold_triton import (
    count_runs_kernel,
    fold_runs,
    place_runs_kernel,
)
from rl_consistency.kernels.experts.pairs_triton import (
    activate_pairs,
    combine_fwd,
    expert_pairs_op,
    gather_rows,
    pair_bwd,
)
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
from tests.kernels.attention.compile_for_sm90 import compile_only, spilled

EXPERTS, TOP_K, ROWS, HIDDEN, WIDTH = 128, 8, 512, 2048, 768
EVERY = sys.argv[1:] == ["all"]


def largest(schedules, size):
    """Those of each kind (pointers or descriptors) with the largest tiles, or every one."""
    kinds = {schedule.kind for schedule in schedules}
    most = {kind: max(size(s) for s in schedules if s.kind == kind) for kind in kinds}
    return [s for s in schedules if EVERY or size(s) == most[s.kind]]


def elements(schedule):
    """Of the output tile of a product of experts."""
    return schedule.tall.block_m * schedule.tall.block_n


def fold_elements(schedule):
    """Of the gradient's tile."""
    return schedule.block_n * schedule.block_k


def calls(dtype):
    """One call of each kernel and schedule."""
    x = torch.empty(ROWS, HIDDEN, dtype=dtype)
    ids = torch.zeros(ROWS, TOP_K, dtype=torch.int32)
    first = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    pairs = ids.flatten()
    gate_up = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype)
    activated = torch.empty(len(pairs), WIDTH, dtype=dtype)
    packed = torch.empty(len(pairs), 2 * WIDTH, dtype=dtype)
    down = torch.empty(EXPERTS, HIDDEN, WIDTH, dtype=dtype)
    weights = torch.zeros(ROWS, TOP_K)
    for schedule in largest(product_candidates("nt", dtype, tma=True), elements):
        for layout, by_row, a, w in (("nt", False, activated, down), ("nn", True, x, down)):
            yield partial(product_fwd, a, w, layout, first, pairs, TOP_K, by_row, schedule)
    for schedule in largest(product_candidates("gate_up", dtype, tma=True), elements):
        yield partial(gate_up_fwd, x, gate_up, first, pairs, TOP_K, "silu", True, schedule)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    buffer = torch.zeros(1, dtype=wide).expand(EXPERTS, 2 * WIDTH, HIDDEN)
    for schedule in largest(fold_candidates(dtype, tma=True), fold_elements):
        yield partial(
            fold_runs, buffer, packed, x, pairs, pairs, first, dy_by_row=False, fresh=False,
            schedule=schedule,
        )  # fmt: skip
    outputs = torch.empty(len(pairs), HIDDEN, dtype=dtype)
    for schedule in (COMBINE[0], COMBINE[-1]):
        yield partial(combine_fwd, outputs, ids, weights, schedule)
        yield partial(gather_rows, x, pairs, first, TOP_K, schedule)
        yield partial(gather_rows, x, pairs, first, 1, schedule)
        yield partial(activate_pairs, packed, first, "silu", schedule)
    for schedule in pair_candidates(WIDTH) if EVERY else pair_candidates(WIDTH)[:1]:
        yield partial(pair_bwd, packed, activated, weights, first, pairs, "silu", schedule)


def routing_calls():
    """The kernels that know no dtype of operands."""
    numbers = torch.zeros(64, dtype=torch.int32)
    for experts in (8, 128, 512) if EVERY else (512,):
        ids = torch.zeros(ROWS, TOP_K, dtype=torch.int32)
        for rows in (16, ROWS):
            yield partial(expert_pairs_op, ids[:rows], numbers, numbers, experts)
        constants = {
            "TOP_K": TOP_K,
            "ROWS": block_rows(experts),
            "BLOCK_E": block_experts(experts),
            "num_warps": 8,
        }
        yield partial(count_runs_kernel[(1,)], numbers, ids, numbers, experts, **constants)
        yield partial(
            place_runs_kernel[(1,)],
            numbers,
            ids,
            ids,
            numbers,
            numbers,
            numbers,
            experts,
            **constants,
        )
        logits, weights = torch.zeros(ROWS, experts), torch.zeros(ROWS, TOP_K)
        entries = candidates(block_experts(experts))
        for schedule in entries if EVERY else entries[-1:]:
            for normalize in (True, False) if schedule == entries[-1] else (True,):
                yield partial(choose_fwd, logits, TOP_K, normalize, schedule)
                p = None if normalize else logits
                yield partial(
                    logits_bwd, weights, ids, weights, p, experts, torch.bfloat16, schedule
                )


if __name__ == "__main__":
    compiled = compile_only()
    dtypes = (torch.bfloat16, torch.float32) if EVERY else (torch.bfloat16,)
    for call in [*(c for dtype in dtypes for c in calls(dtype)), *routing_calls()]:
        call()
    for name, kernel in compiled:
        print(name, spilled(kernel), kernel.metadata.shared)
