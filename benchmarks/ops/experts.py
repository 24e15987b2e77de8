"""Mixture of experts against torch's grouped and batched products and against Transformers.

Ours begin with the ids that the router gives and find the rows of each expert themselves. For stock
the order of the rows and their number at each expert are known beforehand. Rows go to experts
evenly, by a power law, or all to the same; a seed shuffles experts and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from benchmarks.suite import normal, stepped
from benchmarks.timing import Contestant, Machine, Race
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts import cpu, cuda
from rl_consistency.kernels.experts.op import experts as expert_sum
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.models.families import SPARSE, modeling

ACTIVATION = "silu"
SEQUENCE = 1024
"""Tokens of a sequence where a case names none."""

ROUTINGS = ("even", "skewed", "same")
"""even: every expert has equally many rows, up to one. skewed: the i-th expert is drawn with a
share of i^-1.5. same: every row has the same k experts, which is one expert where k is 1."""

SKEW = 1.5
PULL = 20.0
"""Logits between the experts of `same` and all others."""


@dataclass(frozen=True)
class Routing:
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
    experts_hit: int
    """Experts with rows."""

    @classmethod
    def of(cls, expert_ids: Tensor, weights: Tensor, num_experts: int) -> Routing:
        """The routing of these experts."""
        order = expert_ids.flatten().argsort(stable=True)
        counts = torch.bincount(expert_ids.flatten(), minlength=num_experts)
        return cls(
            expert_ids,
            weights,
            rows=order // expert_ids.shape[1],
            places=order.argsort().view(expert_ids.shape),
            ends=counts.cumsum(0).to(torch.int32),
            experts_hit=int((counts > 0).sum()),
        )


def drawn_routing(
    kind: str, tokens: int, num_experts: int, top_k: int, device: torch.device, seed: int = 0
) -> Routing:
    """A routing of `ROUTINGS`."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "even":
        ids = torch.arange(tokens * top_k).view(tokens, top_k) % num_experts
        ids = ids[torch.randperm(tokens, generator=generator)]
    elif kind == "same":
        ids = torch.arange(top_k).expand(tokens, -1)
    else:
        each = _preference(kind, num_experts, top_k).softmax(0).expand(tokens, -1)
        ids = torch.multinomial(each, top_k, generator=generator)
    ids = torch.randperm(num_experts, generator=generator)[ids].sort(dim=1).values
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True)
    return Routing.of(ids.to(device, torch.int32), weights.to(device), num_experts)


def routed_inputs(
    kind: str, tokens: int, num_experts: int, top_k: int, hidden: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A router's weight [E, H] and rows [R, H] in bf16 that it routes about as `kind` says.

    All rows have the value 1 in the first column, where the router has the expert's preference.
    "even" is that of random weights: no expert is preferred, but the numbers of rows vary.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    gate = torch.randn(num_experts, hidden, generator=generator) * hidden**-0.5
    order = torch.randperm(num_experts, generator=generator)
    x[:, 0], gate[:, 0] = 1.0, _preference(kind, num_experts, top_k)[order]
    return gate.to(device, torch.bfloat16), x.to(device, torch.bfloat16)


def _preference(kind: str, num_experts: int, top_k: int) -> Tensor:
    """Logits of the experts [E]; KeyError on another kind."""
    ranks = torch.arange(num_experts)
    return {
        "even": torch.zeros(num_experts),
        "skewed": -SKEW * (ranks + 1).log(),
        "same": PULL * (ranks < top_k),
    }[kind]


class Weights(NamedTuple):
    """Weights of a layer's experts."""

    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]

    @property
    def bytes_per_expert(self) -> float:
        return (self.gate_up.nbytes + self.down.nbytes) / len(self.down)


def _weights(bench: Machine, hidden: int, intermediate: int, num_experts: int) -> Weights:
    gate_up = normal(bench, num_experts, 2 * intermediate, hidden).mul_(hidden**-0.5)
    down = normal(bench, num_experts, hidden, intermediate).mul_(intermediate**-0.5)
    return Weights(gate_up, down)


def _packed(tokens: int, length: int) -> PackedSequences:
    """Sequences of a length; the last one has what is left."""
    starts = range(0, tokens, length)
    return PackedSequences.of(starts, [min(length, tokens - start) for start in starts])


def _gated(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, dim=-1)
    return F.silu(gate) * up


def by_grouped(x: Tensor, weights: Weights, routing: Routing) -> Tensor:
    """The whole work by grouped products."""
    packed = F.grouped_mm(x[routing.rows], weights.gate_up.transpose(1, 2), offs=routing.ends)
    outputs = F.grouped_mm(_gated(packed), weights.down.transpose(1, 2), offs=routing.ends)
    return _weighted_sum(outputs[routing.places], routing)


def by_batched(x: Tensor, weights: Weights, routing: Routing) -> Tensor:
    """The whole work by a product for each pair, with the weights of its expert copied out."""
    ids = routing.expert_ids.flatten().long()
    rows = x.unsqueeze(1).expand(-1, routing.expert_ids.shape[1], -1).reshape(len(ids), -1, 1)
    packed = torch.bmm(weights.gate_up[ids], rows).squeeze(-1)
    outputs = torch.bmm(weights.down[ids], _gated(packed).unsqueeze(-1))
    return _weighted_sum(outputs.view(*routing.expert_ids.shape, -1), routing)


def _weighted_sum(outputs: Tensor, routing: Routing) -> Tensor:
    """[R, H] of outputs [R, k, H]: the fewest passes that torch has for it."""
    weights = routing.weights.to(outputs.dtype).unsqueeze(1)
    return torch.bmm(weights, outputs).squeeze(1)


def by_ours(x: Tensor, weights: Weights, routing: Routing, layout: PackedSequences) -> Tensor:
    """The public op."""
    ids, shares = routing.expert_ids, routing.weights
    return expert_sum(x, ids, shares, *weights, layout, activation=ACTIVATION)


def experts_forward(
    bench: Machine, tokens: int, hidden: int, intermediate: int, experts: int, top_k: int,
    routing: str,
) -> dict[str, Any]:  # fmt: skip
    """Many rows, without gradients."""
    weights = _weights(bench, hidden, intermediate, experts)
    x, layout = normal(bench, tokens, hidden), _packed(tokens, SEQUENCE)
    drawn = drawn_routing(routing, tokens, experts, top_k, bench.device)
    race = Race(
        ours=Contestant.of(partial(by_ours, x, weights, drawn, layout)),
        stock={"grouped_mm": Contestant.of(partial(by_grouped, x, weights, drawn))},
        moved_bytes=drawn.experts_hit * weights.bytes_per_expert + 2 * x.nbytes,
        operations=6.0 * tokens * top_k * hidden * intermediate,
    )
    return bench.measure(race)


def experts_few(
    bench: Machine, tokens: int, hidden: int, intermediate: int, experts: int, top_k: int,
    routing: str,
) -> dict[str, Any]:  # fmt: skip
    """The rows of a decode step, in a CUDA graph. Every call of the graph meets other experts, so
    their weights come from memory."""
    x, layout = normal(bench, tokens, hidden), _packed(tokens, 1)
    expert_bytes = 6.0 * hidden * intermediate
    copies = [
        _weights(bench, hidden, intermediate, experts)
        for _ in range(bench.copies(experts * expert_bytes))
    ]

    def draw(seed: int) -> Routing:
        return drawn_routing(routing, tokens, experts, top_k, bench.device, seed)

    drawn = [draw(seed) for seed in range(bench.copies(draw(0).experts_hit * expert_bytes))]
    hit = sum(each.experts_hit for each in drawn) / len(drawn)
    operands = [(x, copies[i % len(copies)], each) for i, each in enumerate(drawn)]

    def stock(way: Callable[..., Tensor]) -> Contestant:
        return Contestant([partial(way, *each) for each in operands])

    race = Race(
        ours=Contestant([partial(by_ours, *each, layout) for each in operands]),
        stock={"grouped_mm": stock(by_grouped), "batched_mm": stock(by_batched)},
        clock="graph",
        moved_bytes=hit * expert_bytes + 2 * x.nbytes,
    )
    return bench.measure(race) | {"figures": {"experts_hit": hit}}


def experts_gradient(
    bench: Machine, tokens: int, length: int, hidden: int, intermediate: int, experts: int,
    top_k: int, routing: str,
) -> dict[str, Any]:  # fmt: skip
    """The gradients of both weights, continued in fp32 buffers."""
    own: Any = cuda if bench.device.type == "cuda" else cpu
    weights = _weights(bench, hidden, intermediate, experts)
    x, dy = (normal(bench, tokens, hidden) for _ in range(2))
    layout = _packed(tokens, length)
    drawn = drawn_routing(routing, tokens, experts, top_k, bench.device)
    given = (drawn.expert_ids, drawn.weights, *weights, layout, ACTIVATION)
    _, packed, routed = own.experts_fwd(x, *given, True)
    _, _, dpacked, weighted = own.experts_bwd(dy, routed, *given[1:4], packed, ACTIVATION)
    del packed
    ours, stock = ([torch.zeros_like(w, dtype=torch.float32) for w in weights] for _ in range(2))
    in_order = [each[drawn.rows] for each in (x, dy)]

    def fold() -> Sequence[Tensor]:
        vars(routed).pop("runs", None)  # found once in each backward pass
        own.fold(ours[0], dpacked, x, routed, dy_by_row=False, fresh=False)
        own.fold(ours[1], dy, weighted, routed, dy_by_row=True, fresh=False)
        return ours

    def multiply_and_add() -> Sequence[Tensor]:
        for buffer, left, right in (
            (stock[0], dpacked, in_order[0]),
            (stock[1], in_order[1], weighted),
        ):
            buffer.add_(F.grouped_mm(left.t(), right, offs=drawn.ends))
        return stock

    race = Race(
        ours=Contestant.of(fold),
        stock={"grouped_mm + fp32 add": Contestant.of(multiply_and_add)},
        moved_bytes=2.0 * sum(w.numel() * 4 for w in weights),
        operations=6.0 * tokens * top_k * hidden * intermediate,
    )
    return bench.measure(race)


def moe_block(
    bench: Machine, family: str, tokens: int, hidden: int, intermediate: int, experts: int,
    top_k: int, routing: str,
) -> dict[str, Any]:  # fmt: skip
    """Forward and backward of a router and its experts, from no gradient present; weights of ours
    have fp32 gradients, as the trainer has them, those of the others bf16 ones."""
    gate, x = routed_inputs(routing, tokens, experts, top_k, hidden, bench.device)
    weights = _weights(bench, hidden, intermediate, experts)
    dy, layout = normal(bench, tokens, hidden), _packed(tokens, SEQUENCE)
    block = transformers_block(family, gate, weights, top_k)
    normalizes = family != "olmoe"

    def leaves() -> list[Any]:
        """Own leaves, which share the data."""
        return [nn.Parameter(each.detach()) for each in (x, gate, *weights)]

    own, theirs = leaves(), leaves()[0]
    for parameter in own[1:]:
        parameter.grad_dtype = torch.float32

    def ours() -> Tensor:
        rows, router, gate_up, down = own
        ids, shares, _ = route_with_logits(
            rows, router, top_k, normalize=normalizes, weight_grad=GradientBuffer(router)
        )
        buffers = {"gate_up_grad": GradientBuffer(gate_up), "down_grad": GradientBuffer(down)}
        return expert_sum(
            rows, ids, shares, gate_up, down, layout, activation=ACTIVATION, **buffers
        )

    def stock() -> Tensor:
        return block(theirs.unsqueeze(0)).squeeze(0)

    stock_leaves = [theirs, *block.parameters()]
    race = Race(
        ours=Contestant.of(stepped(ours, own, dy)),
        stock={"transformers": Contestant.of(stepped(stock, stock_leaves, dy))},
        operations=18.0 * tokens * top_k * hidden * intermediate,
        tokens=tokens,
        memory=True,
    )
    return bench.measure(race)


def transformers_block(family: str, gate: Tensor, weights: Weights, top_k: int) -> Any:
    """Transformers' block of a family, by grouped products, with copies of given weights."""
    num_experts, hidden, intermediate = weights.down.shape
    config: Any = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts_per_tok=top_k,
        **({"num_local_experts" if family == "mixtral" else "num_experts": num_experts}),
        **({"moe_intermediate_size": intermediate} if family == "qwen3_moe" else {}),
        **({"norm_topk_prob": family == "qwen3_moe"} if family != "mixtral" else {}),
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = getattr(modeling(config), f"{SPARSE[family]}SparseMoeBlock")(config)
    block.gate.weight = nn.Parameter(gate.clone())
    block.experts.gate_up_proj = nn.Parameter(weights.gate_up.clone())
    block.experts.down_proj = nn.Parameter(weights.down.clone())
    return block
