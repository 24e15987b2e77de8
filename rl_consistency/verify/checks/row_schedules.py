"""C1 for a GPU's schedules of ops that treat rows one by one: every entry of a table gives the
bytes of every other."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.pointwise import rotary_cases
from rl_consistency.cases.probe import probe, probe_tokens
from rl_consistency.cases.token_logprobs import sampling_in_turn
from rl_consistency.kernels.gradient_fold import rows_triton as gradient_rows_triton
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.pointwise import glu, rotary
from rl_consistency.kernels.rms_norm import schedules as rms_norm_schedules
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_bwd, rms_norm_fwd
from rl_consistency.kernels.sampling import draw_triton as sampling_triton
from rl_consistency.kernels.sampling import support_triton as sampling_support_triton
from rl_consistency.kernels.sampling.op import triton_distribution
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import rows_of, schedules_alike
from rl_consistency.verify.substitution import attribute
from rl_consistency.verify.sweep import MAX_ROWS, OpSetup

ROWS = MAX_ROWS + 3
"""Most rows of a case: an odd number, ragged for programs of two rows too."""

SAMPLING_SIZES = (
    (sampling_support_triton, "TILE", (512, 1024)),
    (sampling_support_triton, "SPLIT_TILE", (128, 256)),
    (sampling_support_triton, "SPLIT_BLOCKS", (8, 64)),
    (sampling_support_triton, "TOP_BLOCKS", (4, 32)),
    (sampling_support_triton, "PIVOTS", (4, 8)),
    (sampling_triton, "WEIGHT_BLOCKS", (4, 32)),
    (sampling_triton, "PICK_BLOCKS", (256, 512)),
    (sampling_triton, "LOGPROB_ROWS", (32, 64)),
)
"""Tiles and splits of sampling: the module and name of each, and other values to compare with."""


def check_glu_schedules(tally: Tally, setup: OpSetup) -> None:
    """The gated activation and its gradients."""
    size = (min(setup.rows, ROWS), setup.shapes.glu_width)
    gate = setup.drawn(size, 1, 0.25)
    # Where outliers meet, their product must fit fp16.
    up, dy = (setup.drawn(size, seed, 1 / 64) for seed in (2, 3))

    def gradients(schedule: glu.GluSchedule) -> Tensor:
        return rows_of(*glu.glu_bwd(dy, gate, up, "silu", False, schedule))

    entries = glu.CANDIDATES
    schedules_alike(tally, "silu", entries, partial(glu.glu_fwd, gate, up, "silu"))
    schedules_alike(tally, "silu gradient", entries, gradients)


def check_rotary_schedules(tally: Tally, setup: OpSetup) -> None:
    """Rotated queries and keys."""
    *_, case = rotary_cases(setup)
    q, k, cos, sin = case.draw(min(setup.rows, ROWS), 1)

    def rotated(schedule: rotary.RotarySchedule) -> Tensor:
        return rows_of(*rotary.rotary_fwd(q, k, cos, sin, False, schedule))

    schedules_alike(tally, "q and k", rotary.CANDIDATES, rotated)


def check_rms_norm_schedules(tally: Tally, setup: OpSetup) -> None:
    """y, dx and the step sums of dweight, with the residual addition; and of several heads a
    token, whose gradients have a kernel of their own."""
    rows, width = min(setup.rows, ROWS), setup.shapes.norm_widths[0]
    x, residual, dtotal = (setup.drawn((rows, width), seed) for seed in (1, 2, 3))
    _compare_norm(tally, setup, x, residual, dtotal, 1)
    shape = setup.shapes.attention[0]
    x = setup.drawn((rows, shape.heads, shape.head_dim), 4)
    _compare_norm(tally, setup, x, None, None, shape.heads)


def norm_backward_entries(width: int, heads: int) -> list[rms_norm_schedules.NormSchedule | None]:
    """What is compared of the norm's backward pass: None, the kernel for narrow rows, where there
    are several heads; and the chosen schedule and one for each way to go through the rows. There
    are two dozen candidates, which take long to compile."""
    chosen = rms_norm_schedules.pick_backward(width, heads)
    every = (*rms_norm_schedules.candidates(width, heads), chosen)
    entries = {(schedule.split, schedule.stages): schedule for schedule in every}
    return [None, *entries.values()] if heads > 1 else [*entries.values()]


def check_gradient_row_schedules(tally: Tally, setup: OpSetup) -> None:
    """A buffer of embedding rows continued over tokens that repeat, ranked and sorted."""
    # What lies between the rows used does not matter.
    height, width = min(setup.shapes.vocab_size, 1000), setup.shapes.hidden_size
    count = max(setup.rows, 128)
    index = torch.tensor(probe_tokens([count], height, seed=2)[0], device=setup.device)
    # One run longer than any that shares a program, and tokens that are left out.
    index[::3], index[::50] = 5, -1
    rows = setup.drawn((count, width), 3)
    start = probe((height, width), torch.float32, seed=4, device=setup.device)
    start = start.to(accumulator_dtype(rows))

    def continued(choice: tuple[gradient_rows_triton.RowFoldSchedule, bool]) -> Tensor:
        schedule, ranked = choice
        buffer = start.clone()
        gradient_rows_triton.launch_rows(buffer, index, rows, schedule, ranked=ranked)
        return buffer

    choices = [(s, ranked) for s in gradient_rows_triton.CANDIDATES for ranked in (True, False)]
    schedules_alike(tally, "rows", choices, continued)


def check_sampling_schedules(tally: Tally, setup: OpSetup) -> None:
    """Supports, drawn tokens and their logprobs for other tiles and splits of the vocabulary."""
    count, vocab_size = min(setup.rows, MAX_ROWS), setup.shapes.vocab_size
    logits = probe((count, vocab_size), torch.float32, seed=1, scale=0.1, device=setup.device)
    logits[::2] = (logits[::2] * 8).round() / 8  # many are equal
    kinds = ({"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.9})
    kinds += ({"top_k": 50, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.0}, {})
    rows = sampling_in_turn(kinds, count, setup.device)
    uniforms = torch.arange(count, device=setup.device).double() / count

    def sampled() -> Tensor:
        found = triton_distribution(logits, rows)
        token_ids = found.draw(uniforms)
        logprobs = found.logprobs_of(token_ids).view(torch.int32)
        # Of a support what is in it: a search may end at any key between two logits.
        inside = (found.scaled > -torch.inf).int()
        return torch.cat([token_ids.int()[:, None], logprobs[:, None], inside], dim=1)

    whole = sampled()
    # A size is a constant of its module, so threads cannot compile for several side by side.
    for i in range(len(SAMPLING_SIZES[0][2])):
        with ExitStack() as stack:
            for module, name, sizes in SAMPLING_SIZES:
                stack.enter_context(attribute(module, name, sizes[i]))
            found = sampled()
        case = ", ".join(f"{name} {sizes[i]}" for _, name, sizes in SAMPLING_SIZES)
        tally.equal(case, whole, found)


def _compare_norm(
    tally: Tally, setup: OpSetup, x: Tensor, residual: Any, dtotal: Any, heads: int
) -> None:
    """Forward by every schedule and backward by `norm_backward_entries`, of x [T, H] or
    [T, heads, H]."""
    width, eps = x.shape[-1], 1e-6
    # Small: where outliers meet, gradients must fit fp16.
    weight, dy = setup.drawn((width,), 5, 0.1), setup.drawn(tuple(x.shape), 6, 0.01)

    normed = partial(rms_norm_fwd, x.view(-1, width), residual, weight, eps)

    def forward(schedule: rms_norm_schedules.NormSchedule) -> Tensor:
        y, total, rstd = normed(schedule)
        return rows_of(y, rstd) if residual is None else rows_of(y, total, rstd)

    name = f"width {width}" if heads == 1 else f"{heads} heads of {width}"
    schedules_alike(tally, name, rms_norm_schedules.candidates(width), forward)
    _, total, rstd = normed(None)
    normalized = x if residual is None else total

    def gradients(schedule: rms_norm_schedules.NormSchedule | None) -> Tensor:
        dx, sums = rms_norm_bwd(dy, dtotal, normalized, weight, rstd, heads, True, schedule)
        return torch.cat([dx.float().view(-1, width), sums])

    entries = norm_backward_entries(width, heads)
    schedules_alike(tally, f"{name}, backward", entries, gradients)
