"""C1 for a GPU's schedules of ops that treat rows one by one: every entry of a table gives the
bytes of every other."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from rl_consistency.cases import launches
from rl_consistency.cases.probe import probe, probe_tokens
from rl_consistency.cases.token_logprobs import sampling_in_turn
from rl_consistency.kernels.rms_norm import schedules as rms_norm_schedules
from rl_consistency.kernels.sampling import draw_triton as sampling_triton
from rl_consistency.kernels.sampling import support_triton as sampling_support_triton
from rl_consistency.kernels.sampling.op import triton_distribution
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import launch_alike
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
    size = min(setup.rows, ROWS), setup.shapes.glu_width
    for direction in ("forward", "backward"):
        launch_alike(tally, launches.gated(setup, direction, *size, "silu"))


def check_rotary_schedules(tally: Tally, setup: OpSetup) -> None:
    """Rotated queries and keys."""
    s = setup.shapes.attention[0]
    rows = min(setup.rows, ROWS)
    launch_alike(tally, launches.rotation(setup, rows, s.heads, s.kv_heads, s.head_dim))


def check_rms_norm_schedules(tally: Tally, setup: OpSetup) -> None:
    """y, dx and the step sums of dweight, with the residual addition; and of several heads a
    token, whose gradients have a kernel of their own."""
    rows, shape = min(setup.rows, ROWS), setup.shapes.attention[0]
    for width, heads in ((setup.shapes.norm_widths[0], 1), (shape.head_dim, shape.heads)):
        adds, table = heads == 1, norm_backward_entries(width, heads)
        launch_alike(tally, launches.norm_forward(setup, rows * heads, width, adds=adds))
        backward = launches.norm_backward(setup, rows, width, heads, adds=adds, table=table)
        launch_alike(tally, backward)


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
    height, count = min(setup.shapes.vocab_size, 1000), max(setup.rows, 128)
    index = torch.tensor(probe_tokens([count], height, seed=2)[0], device=setup.device)
    # One run longer than any that shares a program, and tokens that are left out.
    index[::3], index[::50] = 5, -1
    launch_alike(tally, launches.gradient_rows(setup, index, height, setup.shapes.hidden_size))


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
