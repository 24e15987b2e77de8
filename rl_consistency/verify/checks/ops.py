"""C1 and C3 op by op: a row alone and among others is the same bytes; parameter gradients are left
folds, whatever the cut into calls and the filler. The ops and their operands stand in `cases`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.case import weight_scale
from rl_consistency.cases.experts import EXPERTS, TOP_K, experts_cases
from rl_consistency.cases.probe import probe
from rl_consistency.cases.table import CASES
from rl_consistency.cases.token_logprobs import token_logprobs_cases
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.pointwise.rotary import rotary_table
from rl_consistency.kernels.reduction.sums import gradient_norm, masked_mean, masked_sum
from rl_consistency.kernels.token_logprobs.op import IGNORED
from rl_consistency.verify import laws
from rl_consistency.verify.checks.attention import packed
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.sweep import OpSetup, padded

LENGTHS = (1, 15, 16, 17, 40, 5)
"""Sequences of a step of experts, around the fold's step."""


def check_rows(tally: Tally, setup: OpSetup, op: str) -> None:
    """C1 of an op that treats rows one by one, and of every other way to its bytes."""
    for case in CASES[op](setup):
        laws.case_rows_alike(tally, case, setup.rows, setup.sweep.row_counts())
        laws.case_ways_alike(tally, case, setup.rows)


def check_fold(tally: Tally, setup: OpSetup, op: str) -> None:
    for case in CASES[op](setup):
        if case.parameters and case.cuts:
            laws.case_cuts_alike(tally, case, setup.rows)


def check_rotary(tally: Tally, setup: OpSetup) -> None:
    """Rows, and the table for any reach of positions."""
    check_rows(tally, setup, "rotary")
    dim = setup.shapes.attention[0].head_dim
    inv_freq = setup.shapes.rope_theta ** -(torch.arange(0, dim, 2) / dim)
    table = rotary_table(inv_freq, 2 * setup.rows).to(setup.device)
    for reach in setup.sweep.row_counts():
        short = rotary_table(inv_freq, reach).to(setup.device).transpose(0, 1)
        expected = table[:, :reach].transpose(0, 1)
        tally.equal(f"table of {reach}", expected, short, "position {}".format)


def check_router(tally: Tally, setup: OpSetup) -> None:
    """Rows; logits are those of `linear`, not rounded; equal ones go to the lower id."""
    check_rows(tally, setup, "router")
    hidden = setup.shapes.hidden_size
    weight = setup.drawn((EXPERTS, hidden), 1, weight_scale(hidden))
    x = setup.drawn((setup.rows, hidden), 2)
    _, _, logits = route_with_logits(x, weight, TOP_K, normalize=True)
    rounded = logits.to(setup.dtype)
    tally.equal("logits, rounded once, are those of linear", linear(x, weight), rounded)
    if setup.dtype != torch.float32:
        unrounded = bool((logits != rounded.float()).any())
        tally.expect("logits have digits that their dtype has not", unrounded)
    ids, _, _ = route_with_logits(x, weight[:1].repeat(EXPERTS, 1), TOP_K, normalize=True)
    lowest = torch.arange(TOP_K, device=x.device, dtype=ids.dtype).expand_as(ids)
    tally.expect("equal logits go to the lower ids", torch.equal(ids, lowest), f"row 0: {ids[0]}")


def check_token_logprobs(tally: Tally, setup: OpSetup) -> None:
    """Rows, plain and truncated, and whichever of them are scored."""
    check_rows(tally, setup, "token_logprobs")
    *_, case = token_logprobs_cases(setup)
    hidden, targets, *parameters, weight = case.draw(setup.rows, 1)
    skipped = torch.arange(setup.rows, device=setup.device) % 3 == 0
    some = targets.masked_fill(skipped, IGNORED)
    whole, found = (
        torch.stack(case.call(hidden, own, *parameters, weight), dim=1)[~skipped]
        for own in (targets, some)
    )
    tally.equal("a third ignored", whole, found)


def check_masked_reduction(tally: Tally, setup: OpSetup) -> None:
    """Sum and mean of the same active values under every padding; inactive places hold NaN."""
    parts = [setup.drawn((n,), i) for i, n in enumerate(setup.sweep.sample_lengths())]
    flat = torch.cat(parts)
    expected = torch.stack([masked_sum(flat), masked_mean(flat)])
    for pad in setup.sweep.pads:
        for side in ("left", "right"):
            values, mask = padded(parts, pad, side, filler=torch.nan)
            found = torch.stack([masked_sum(values, mask), masked_mean(values, mask)])
            tally.equal(f"{side} padding {pad}", expected, found, ("sum", "mean").__getitem__)
    tally.equal("run again", expected, torch.stack([masked_sum(flat), masked_mean(flat)]))


def check_gradient_norm(tally: Tally, setup: OpSetup) -> None:
    """The norm of the same gradients stored in other ways and computed by other thread counts."""
    # Gradients are fp32 whatever the model is.
    shapes = [(n, 96) for n in setup.sweep.lengths] + [(1_048_583,)]
    drawn = partial(probe, scale=0.01, device=setup.device)
    gradients = [drawn(shape, seed=i) for i, shape in enumerate(shapes)]
    expected = gradient_norm(gradients)
    strided = [g.repeat_interleave(2, dim=0)[::2] for g in gradients]
    tally.equal("strided storage", expected, gradient_norm(strided))
    tally.equal("laws.misaligned storage", expected, gradient_norm(map(laws.misaligned, gradients)))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tally.equal(f"{count} threads", expected, gradient_norm(gradients))
    finally:
        torch.set_num_threads(threads)


def check_lm_head_fold(tally: Tally, setup: OpSetup) -> None:
    """The LM head's gradient inside `token_logprobs`, under cuts and under chunks of tokens."""
    check_fold(tally, setup, "token_logprobs")
    for case in token_logprobs_cases(setup):
        *operands, head = case.draw(setup.rows, 1)
        weight, whole = laws.parameter_of(head), None
        buffer = GradientBuffer(weight)
        for chunk in (1024, 16, 48):
            weight.grad = None
            found = case.call(*operands, weight, weight_grad=buffer, chunk_tokens=chunk)
            torch.autograd.backward(found, case.draw_dys(setup.rows, 1))
            assert weight.grad is not None
            whole = weight.grad.clone() if whole is None else whole
            tally.equal(f"{case.size}, chunk_tokens {chunk}", whole, weight.grad)


def check_experts(tally: Tally, setup: OpSetup) -> None:
    """Rows; those that no sequence owns are zeros."""
    check_rows(tally, setup, "experts")
    (case,) = experts_cases(setup)
    x, ids, weights, gate_up, down = case.draw(max(setup.rows, 4 * STEP), 4)
    alone = case.call(x, ids, weights, gate_up, down).detach()
    spans = {0: STEP - 3, STEP: STEP, 3 * STEP: 7}
    layout = PackedSequences.of([*spans], [*spans.values()])
    found = experts(x, ids, weights, gate_up, down, layout, activation="silu").detach()
    owned = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    for start, length in spans.items():
        owned[start : start + length] = True
    tally.equal("rows of sequences among filler", alone.where(owned, 0.0), found)


def check_experts_fold(tally: Tally, setup: OpSetup) -> None:
    """Gradients of both weights under cuts between sequences, and filler between them."""
    (case,) = experts_cases(setup)
    x, ids, weights, *drawn = case.draw(sum(LENGTHS), 4)
    dy = setup.drawn(tuple(x.shape), 9, 0.02)
    gate_up, down = map(laws.parameter_of, drawn)
    buffers: Any = {"gate_up_grad": GradientBuffer(gate_up), "down_grad": GradientBuffer(down)}
    parts = [p.split(list(LENGTHS)) for p in (x, ids, weights, dy)]
    filler = (1.0, torch.arange(TOP_K), 1.0, 1.0)  # ids ascend there too

    def gradients(groups: Sequence[Sequence[int]], gap: int) -> list[Tensor]:
        for parameter in (gate_up, down):
            parameter.grad = None
        for group in groups:
            layout, given = packed([[p[i] for p in parts] for i in group], gap, junk=filler)
            x, ids, weights, dy = given
            y = experts(x, ids, weights, gate_up, down, layout, activation="silu", **buffers)
            y.backward(dy)
        return [p.grad for p in (gate_up, down) if p.grad is not None]

    everything = list(range(len(LENGTHS)))
    whole = gradients([everything], 0)
    tally.expect("both weights have a gradient", len(whole) == 2)
    ways = {
        "run again": ([everything], 0),
        "one by one": ([[i] for i in everything], 0),
        "two calls": ([everything[:2], everything[2:]], 0),
        "filler of 2 steps": ([everything], 2),
        "cut, filler of 1 step": ([everything[:4], everything[4:]], 1),
    }
    for name, (groups, gap) in ways.items():
        for expected, actual in zip(whole, gradients(groups, gap), strict=True):
            tally.equal(name, expected, actual)
