"""Mixture of experts against torch's grouped products.

Ours begin with the ids that the router gives and find the rows of each expert themselves. For stock
the order of the rows and their number at each expert are known beforehand. Rows go to experts
evenly, by a power law, or all to the same; a seed shuffles experts and rows. A whole sparse model
is measured beside Transformers by `python -m benchmarks train`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.dense import normal, stepped
from benchmarks.timing import Contestant, Machine
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.op import experts as expert_sum
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer

SEQUENCE, DECODED = 1024, 256
"""Tokens of a sequence, and the most tokens that are a decode step of as many sequences."""

ROUTINGS = ("even", "skewed", "same")
"""even: every expert has equally many rows, up to one. skewed: the i-th expert is drawn with a
share of i^-1.5. same: every row has the same k experts, which is one expert where k is 1."""


class Routing(NamedTuple):
    """The experts of rows, and their order by expert."""

    expert_ids: Tensor
    """[R, k] int32, ascending in each row."""
    weights: Tensor
    """[R, k] fp32, of sum 1 in each row."""
    rows: Tensor
    """[R * k] int64, the row of each pair; pairs by expert, then by row."""
    places: Tensor
    """[R, k] int64, where each row's pairs stand."""
    ends: Tensor
    """[E] int32, where each expert's pairs end."""


def drawn_routing(
    kind: str, tokens: int, num_experts: int, top_k: int, device: torch.device, seed: int = 0
) -> Routing:
    """A routing of `ROUTINGS`."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "skewed":
        shares = torch.arange(1.0, num_experts + 1).pow(-1.5).expand(tokens, -1)
        ids = torch.multinomial(shares, top_k, generator=generator)
    else:
        step = 0 if kind == "same" else top_k
        ids = (torch.arange(tokens)[:, None] * step + torch.arange(top_k)) % num_experts
        ids = ids[torch.randperm(tokens, generator=generator)]
    ids = torch.randperm(num_experts, generator=generator)[ids].sort(dim=1).values
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    order = ids.flatten().argsort(stable=True)
    return Routing(
        ids.to(device, torch.int32),
        (weights / weights.sum(dim=1, keepdim=True)).to(device),
        rows=(order // top_k).to(device),
        places=order.argsort().view(ids.shape).to(device),
        ends=torch.bincount(ids.flatten(), minlength=num_experts).cumsum(0).to(device, torch.int32),
    )


def by_grouped(x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing) -> Tensor:
    """The whole work by grouped products."""
    packed = F.grouped_mm(x[routing.rows], gate_up.transpose(1, 2), offs=routing.ends)
    gate, up = packed.chunk(2, dim=-1)
    outputs = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=routing.ends)
    weights = routing.weights.to(outputs.dtype).unsqueeze(1)
    return torch.bmm(weights, outputs[routing.places]).squeeze(1)


def experts(
    backward: bool, bench: Machine, tokens: int, hidden: int, intermediate: int, experts: int,
    top_k: int, routing: str,
) -> dict[str, Any]:  # fmt: skip
    """The forward, or the forward and the backward from no gradient present: of ours to fp32
    gradients, of the others to bf16 ones. A decode step runs in a CUDA graph, of which every call
    meets other experts, so that their weights come from memory."""
    decoded, expert_bytes = tokens <= DECODED and not backward, 6.0 * hidden * intermediate
    length = 1 if decoded else SEQUENCE
    starts = range(0, tokens, length)
    layout = PackedSequences.of(starts, [min(length, tokens - start) for start in starts])
    x, dy = normal(bench, tokens, hidden), normal(bench, tokens, hidden)

    def draw(seed: int) -> Routing:
        return drawn_routing(routing, tokens, experts, top_k, bench.device, seed)

    def weights() -> list[Tensor]:
        sizes = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
        return [normal(bench, *size).mul_(size[-1] ** -0.5) for size in sizes]

    hit = int(draw(0).expert_ids.unique().numel())
    drawn = [*map(draw, range(bench.copies(hit * expert_bytes) if decoded else 1))]
    held = [weights() for _ in range(bench.copies(experts * expert_bytes) if decoded else 1)]

    def ours(x: Tensor, gate_up: Any, down: Any, routing: Routing) -> Tensor:
        buffers = {}
        if backward:
            gate_up.grad_dtype = down.grad_dtype = torch.float32
            buffers = {"gate_up_grad": GradientBuffer(gate_up), "down_grad": GradientBuffer(down)}
        given = routing.expert_ids, routing.weights, gate_up, down, layout
        return expert_sum(x, *given, activation="silu", **buffers)

    def contestant(way: Callable[..., Tensor]) -> Contestant:
        if backward:
            return stepped(partial(way, routing=drawn[0]), (x, *held[0]), dy)
        turns = cycle(held)
        return Contestant([partial(way, x, *next(turns), each) for each in drawn])

    fields = bench.measure(
        ours=contestant(ours),
        stock={"grouped_mm": contestant(by_grouped)},
        clock="graph" if decoded else "events",
        moved_bytes=0.0 if backward else hit * expert_bytes + 2 * x.nbytes,
        operations=(18.0 if backward else 6.0) * tokens * top_k * hidden * intermediate,
        memory=backward,
    )
    return fields | {"figures": {"experts_hit": hit}}
