"""C1 and C3 of router and experts: a row's experts, weights and outputs do not depend on others;
gradients of the experts are folds over runs, whatever the cut between sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.glu.op import glu
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.router.op import route_with_logits
from rl_consistency.verify.checks.op_setup import OpSetup
from rl_consistency.verify.checks.ops import parameter_of, weight_scale
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import cuts_alike, leaf_gradients, rows_alike

EXPERTS, TOP_K, INNER = 12, 3, 48
LENGTHS = (1, 15, 16, 17, 40, 5)
"""Sequences of a step, around the fold's step."""


def check_router(tally: Tally, setup: OpSetup) -> None:
    """Ids, weights and logits of a row, and dx; logits are those of `linear`, not rounded; equal
    ones go to the lower id."""
    hidden = setup.shapes.hidden_size
    weight = setup.drawn((EXPERTS, hidden), 1, weight_scale(hidden))
    x = setup.drawn((setup.rows, hidden), 2)
    for normalize in (True, False):

        def routed(x: Tensor, normalize: bool = normalize) -> Tensor:
            found = route_with_logits(x, weight, TOP_K, normalize=normalize)
            return torch.cat([part.float() for part in found], dim=1)

        def gradient(x: Tensor, dy: Tensor, normalize: bool = normalize) -> Tensor:
            run = partial(route_with_logits, weight=weight, top_k=TOP_K, normalize=normalize)
            return leaf_gradients(lambda x: run(x)[1:], (x,), *dy.split([TOP_K, EXPERTS], 1))[0]

        dy = setup.drawn((setup.rows, TOP_K + EXPERTS), 3, 0.02).float()
        name = "normalized" if normalize else "plain"
        counts = setup.sweep.row_counts()
        rows_alike(tally, name, routed, x, counts=counts)
        if setup.dtype != torch.float16:
            rows_alike(tally, f"{name} dx", gradient, x, dy, counts=counts)
    _, _, logits = route_with_logits(x, weight, TOP_K, normalize=True)
    rounded = logits.to(setup.dtype)
    tally.equal("logits, rounded once, are those of linear", linear(x, weight), rounded)
    if setup.dtype != torch.float32:
        unrounded = bool((logits != rounded.float()).any())
        tally.expect("logits have digits that their dtype has not", unrounded)
    ids, _, _ = route_with_logits(x, weight[:1].repeat(EXPERTS, 1), TOP_K, normalize=True)
    lowest = torch.arange(TOP_K, device=x.device, dtype=ids.dtype).expand_as(ids)
    tally.expect("equal logits go to the lower ids", torch.equal(ids, lowest), f"row 0: {ids[0]}")


def check_experts(tally: Tally, setup: OpSetup) -> None:
    """y, dx and dweights of a row; y is what the ops it is made of give; rows that no sequence owns
    are zeros."""
    rows = max(setup.rows, 4 * STEP)
    x, ids, weights, gate_up, down = experts_probe(setup, rows)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        layout = PackedSequences.of([0], [len(x)])
        return experts(x, ids, weights, gate_up, down, layout, activation="silu")

    def gradients(x: Tensor, ids: Tensor, weights: Tensor, dy: Tensor) -> Tensor:
        found = leaf_gradients(lambda x, w: run(x, ids, w), (x, weights), dy)
        return torch.cat([part.float() for part in found], dim=1)

    counts = setup.sweep.row_counts()
    rows_alike(tally, "y", run, x, ids, weights, counts=counts)
    if setup.dtype != torch.float16:
        dy = setup.drawn((rows, x.shape[1]), 9, 0.02)
        rows_alike(tally, "dx, dweights", gradients, x, ids, weights, dy, counts=counts)
    alone = run(x, ids, weights).detach()
    tally.equal("by linear and glu, ids upward", _by_ops(x, ids, weights, gate_up, down), alone)
    starts, lens = [0, STEP, 3 * STEP], [STEP - 3, STEP, 7]
    layout = PackedSequences.of(starts, lens)
    found = experts(x, ids, weights, gate_up, down, layout, activation="silu").detach()
    owned = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    for start, length in zip(starts, lens, strict=True):
        owned[start : start + length] = True
    tally.equal("rows of sequences among filler", alone.where(owned, 0.0), found)


def check_router_fold(tally: Tally, setup: OpSetup) -> None:
    """dweight of the router, through its weights."""
    hidden = setup.shapes.hidden_size
    weight = parameter_of(setup.drawn((EXPERTS, hidden), 1, weight_scale(hidden)))
    buffer = GradientBuffer(weight)

    def backward(x: Tensor, dy: Tensor) -> None:
        _, found, _ = route_with_logits(x, weight, TOP_K, normalize=True, weight_grad=buffer)
        found.backward(dy.float())

    inputs = setup.drawn((setup.rows, hidden), 2), setup.drawn((setup.rows, TOP_K), 3)
    cuts_alike(tally, (weight,), backward, inputs, (1.0, 0.0))


def check_experts_fold(tally: Tally, setup: OpSetup) -> None:
    """Gradients of both weights under cuts between sequences, and filler between them."""
    x, ids, weights, *drawn = experts_probe(setup, sum(LENGTHS))
    dy = setup.drawn(tuple(x.shape), 9, 0.02)
    gate_up, down = map(parameter_of, drawn)
    buffers = GradientBuffer(gate_up), GradientBuffer(down)
    parts = [p.split(list(LENGTHS)) for p in (x, ids, weights, dy)]

    def gradients(groups: Sequence[Sequence[int]], gap: int) -> list[Tensor]:
        for parameter in (gate_up, down):
            parameter.grad = None
        for group in groups:
            rows, layout = _packed([[part[i] for part in parts] for i in group], gap)
            x, ids, weights, dy = rows
            y = experts(
                x,
                ids,
                weights,
                gate_up,
                down,
                layout,
                activation="silu",
                gate_up_grad=buffers[0],
                down_grad=buffers[1],
            )
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


def experts_probe(setup: OpSetup, rows: int) -> tuple[Tensor, ...]:
    """x, ids, weights, gate_up and down."""
    hidden = setup.shapes.hidden_size
    # Gate times up grows with the square of x, and fp16 ends at 65504.
    x = setup.drawn((rows, hidden), 4, 0.005 if setup.dtype == torch.float16 else 0.1)
    gate = setup.drawn((EXPERTS, hidden), 5, weight_scale(hidden))
    ids, weights, _ = route_with_logits(x, gate, TOP_K, normalize=True)
    gate_up = setup.drawn((EXPERTS, 2 * INNER, hidden), 6, weight_scale(hidden))
    down = setup.drawn((EXPERTS, hidden, INNER), 7, weight_scale(INNER))
    return x, ids, weights.detach(), gate_up, down


def _by_ops(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The sum of each row's experts, in fp32 from the lowest id on, rounded once."""
    y = torch.zeros_like(x, dtype=torch.float32)
    begun = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    for expert in range(EXPERTS):
        chosen = ids == expert
        gate, up = linear(x, gate_up[expert]).chunk(2, dim=1)
        weight = weights.where(chosen, 0.0).sum(1, keepdim=True)
        part = weight * linear(glu(gate, up, "silu"), down[expert]).float()
        here = chosen.any(1, keepdim=True)
        y = torch.where(here, torch.where(begun, y + part, part), y)
        begun |= here
    return y.to(x.dtype)


def _packed(
    sequences: Sequence[Sequence[Tensor]], gap: int
) -> tuple[list[Tensor], PackedSequences]:
    """Each sequence's tensors, starting on a step behind `gap` steps of filler, which has ones."""
    starts: list[int] = []
    columns: list[list[Tensor]] = [[] for _ in sequences[0]]
    end = 0
    for sequence in sequences:
        length = len(sequence[0])
        starts.append(end + gap * STEP)
        tail = -length % STEP
        for column, own in zip(columns, sequence, strict=True):
            filler = own.new_ones((gap * STEP + tail, *own.shape[1:]))
            column += [filler[: gap * STEP], own, filler[gap * STEP :]]
        end = starts[-1] + length + tail
    rows = [torch.cat(column) for column in columns]
    # Ids have to ascend in filler too.
    rows[1] = torch.where(
        (rows[1] == 1).all(dim=1, keepdim=True),
        torch.arange(rows[1].shape[1], device=rows[1].device, dtype=rows[1].dtype),
        rows[1],
    )
    return rows, PackedSequences.of(starts, [len(s[0]) for s in sequences])
