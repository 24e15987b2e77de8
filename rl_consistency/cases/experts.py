"""Cases of the router and the experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.cases.case import MANY, Case, Setting, seeds, weight_scale
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.op import experts, experts_reference
from rl_consistency.kernels.experts.route import route_reference, route_with_logits
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.pointwise.glu import glu

EXPERTS, TOP_K, INNER = 12, 3, 48


def router_cases(setting: Setting) -> Iterator[Case]:
    """The choice of some experts, and the weights of all: stock rounds its logits, and may choose
    others among fewer."""
    hidden = setting.shapes.hidden_size

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        x = setting.drawn((rows, hidden), seed, 0.1)
        return x, setting.drawn((EXPERTS, hidden), seed + 1, weight_scale(hidden))

    def chosen_dys(rows: int, seed: int) -> tuple[Tensor, ...]:
        return setting.wide((rows, TOP_K), seed + 2, 0.02), setting.wide(
            (rows, EXPERTS), seed + 3, 0.02
        )

    def exact(x: Tensor, weight: Tensor, normalize: bool) -> tuple[Tensor, ...]:
        found = route_reference(x, weight, TOP_K, normalize=normalize)
        return *found, x @ weight.t()

    for size, normalize in (("normalized", True), ("plain", False)):
        yield Case(
            op="router",
            size=size,
            rows=("x",),
            shared=("weight",),
            gradients=("x", "weight"),
            outputs=("ids", "weights", "logits"),
            draw=draw,
            draw_dys=chosen_dys,
            call=partial(route_with_logits, top_k=TOP_K, normalize=normalize),
            reference=partial(exact, normalize=normalize),
            filler={"x": 1.0},
        )

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).softmax(-1, dtype=torch.float32).to(x.dtype)

    def of_all(x: Tensor, weight: Tensor, **buffers: Any) -> Tensor:
        return route_with_logits(x, weight, EXPERTS, normalize=False, **buffers)[1]

    yield Case(
        op="router",
        size=f"{hidden} x {EXPERTS}",
        rows=("x",),
        shared=("weight",),
        gradients=("x", "weight"),
        outputs=("weights",),
        draw=draw,
        draw_dys=lambda rows, seed: (setting.drawn((rows, EXPERTS), seed + 2, 0.02),),
        call=of_all,
        stock=stock,
        reference=lambda x, weight: (x @ weight.t()).softmax(-1),
        seeds=seeds(MANY),
        filler={"x": 1.0},
    )


def experts_cases(setting: Setting) -> Iterator[Case]:
    """Experts of one sequence; stock is transformers' loop over them, for the same choice."""
    hidden = setting.shapes.hidden_size

    def draw(rows: int, seed: int) -> tuple[Tensor, ...]:
        # Gate times up grows with the square of x, and fp16 ends at 65504.
        x = setting.drawn((rows, hidden), seed, 0.005 if setting.dtype == torch.float16 else 0.1)
        gate = setting.drawn((EXPERTS, hidden), seed + 1, weight_scale(hidden))
        ids, weights, _ = route_with_logits(x, gate, TOP_K, normalize=True)
        gate_up = setting.drawn((EXPERTS, 2 * INNER, hidden), seed + 2, weight_scale(hidden))
        down = setting.drawn((EXPERTS, hidden, INNER), seed + 3, weight_scale(INNER))
        return x, ids, weights.detach(), gate_up, down

    def ours(x: Tensor, ids: Tensor, weights: Tensor, *both: Tensor, **buffers: Any) -> Tensor:
        gate_up, down = both
        layout = PackedSequences.of([0], [len(x)])
        return experts(x, ids, weights, gate_up, down, layout, activation="silu", **buffers)

    def stock(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(len(gate_up)):
            rows, place = torch.where(ids == expert)
            gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
            own = F.linear(F.silu(gate) * up, down[expert]) * weights[rows, place, None]
            total = total.index_add(0, rows, own.to(x.dtype))
        return total

    yield Case(
        op="experts",
        size=f"{hidden} x {INNER}, {TOP_K} of {EXPERTS}",
        rows=("x", "ids", "weights"),
        shared=("gate_up", "down"),
        gradients=("x", "weights", "gate_up", "down"),
        draw=draw,
        draw_dys=lambda rows, seed: (setting.drawn((rows, hidden), seed + 5, 0.02),),
        call=ours,
        stock=stock,
        reference=experts_reference,
        seeds=(4,),
        forward_ways={"by linear and glu, ids upward": by_expert},
        cuts=False,
    )


def by_expert(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The sum of each row's experts, in fp32 from the lowest id on, rounded once."""
    y = torch.zeros_like(x, dtype=torch.float32)
    begun = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    for expert in range(len(down)):
        chosen = ids == expert
        gate, up = linear(x, gate_up[expert]).chunk(2, dim=1)
        weight = weights.where(chosen, 0.0).sum(1, keepdim=True)
        part = weight * linear(glu(gate, up, "silu"), down[expert]).float()
        here = chosen.any(1, keepdim=True)
        y = torch.where(here, torch.where(begun, y + part, part), y)
        begun |= here
    return y.to(x.dtype)
