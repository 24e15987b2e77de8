"""Mixtures of experts: router, experts and the block around them, what a pass was routed to, and
the load-balancing loss.

Transformers' classes of Qwen3-MoE, OLMoE and Mixtral have the same parts: `gate.weight` [E, H],
`experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I].

The loss is that of each sequence by itself: a sum over sequences, so no cut moves a bit.

    loss[s] = mean over the sparse layers of the sum over e of f[s, e] * P[s, e]
    f[s, e] = E / (k T) * how many of the T tokens of s met expert e;  P[s, e] = their mean
              probability of e under a softmax over all experts

A perfectly balanced sequence has 1. Gradients go through P alone.

Order: of the sums over tokens none, since they are sums of integers: a probability is rounded to a
multiple of 2^-40. The softmax adds a row's experts by the halving tree. The gradient of a row
depends on its own logits and on the integers of its sequence.

Source: DeepSeek-V3 Technical Report (2024), its complementary sequence-wise auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences
from rl_consistency.kernels.core.autograd import once_differentiable
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.kernels.gradient_fold.gradient_buffer import BackwardPasses, ForwardPass
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.models.modules import CanonicalModule, LayerCall
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import is_canonical


class CanonicalRouter(CanonicalModule):
    """The gate: which experts a row goes to, and with which weights."""

    op = "router"
    top_k: int
    normalizes: bool
    """Whether the k weights are divided by their sum."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [R, E], weights [R, k], expert ids [R, k]) of rows [R, H], as stock returns them.

        Ids ascend in each row, in fp32 like the weights are the logits. On the stock path the
        largest weight comes first, and dtypes are stock's.
        """
        if not is_canonical("router"):
            return super().forward(hidden_states)
        ids, weights, logits = route_with_logits(
            hidden_states,
            self.weight,
            self.top_k,
            normalize=self.normalizes,
            weight_grad=self.gradient_buffer("weight"),
        )
        return logits, weights, ids


class RoutedCall:
    """Where the rows of one layer go; like `LayerCall`, nothing that FSDP2 looks into."""

    def __init__(self, expert_ids: Tensor, weights: Tensor, attention_layout: AttentionLayout):
        self.expert_ids, self.weights = expert_ids, weights
        self.attention_layout = attention_layout


class CanonicalExperts(CanonicalModule):
    """All experts of a layer, their weights in two parameters."""

    op = "experts"
    activation: str
    if TYPE_CHECKING:
        gate_up_proj: Tensor
        down_proj: Tensor

    def forward(self, hidden_states: Tensor, *, call: RoutedCall) -> Tensor:
        """[R, H] of rows [R, H]; zeros in rows that no sequence of the layout owns, which reach no
        expert. The stock path computes those too."""
        top_k_index, top_k_weights = call.expert_ids, call.weights
        if not is_canonical("experts"):
            if compiles_only():
                return torch.empty_like(hidden_states)  # expert ids have no values then
            return super().forward(hidden_states, top_k_index.long(), top_k_weights)
        if not is_canonical("router"):
            top_k_index, rank = top_k_index.sort(dim=1)
            top_k_index = top_k_index.to(torch.int32)
            top_k_weights = top_k_weights.gather(1, rank).float()
        return experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            call.attention_layout,
            activation=self.activation,
            gate_up_grad=self.gradient_buffer("gate_up_proj"),
            down_grad=self.gradient_buffer("down_proj"),
        )


class CanonicalMoEBlock(CanonicalModule):
    """A router and its experts in the place of a layer's MLP."""

    gate: CanonicalRouter
    experts: CanonicalExperts

    def forward(self, hidden_states: Tensor, *, call: LayerCall) -> Tensor:
        """[1, R, H] of packed rows [1, R, H]."""
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        logits, weights, ids = self.gate(rows)
        record_routing(logits, ids)
        out = self.experts(rows, call=RoutedCall(ids, weights, call.attention_layout))
        return out.view(hidden_states.shape)


class Routed(NamedTuple):
    """The routing of one layer."""

    logits: Tensor | None
    """[R, E], differentiable; fp32 but on the stock path. None where they are not asked for."""
    expert_ids: Tensor
    """[R, k], ascending in each row but on the stock path."""


@dataclass(eq=False)
class RoutingRecord:
    """The routing of a forward pass: of all sparse layers, in their order."""

    keeps_logits: bool = False
    layers: list[Routed] = field(default_factory=list)
    ran_without_gradients: bool = False
    """Whether a layer ran without gradients, as in checkpointing with `use_reentrant`."""
    forward: tuple[BackwardPasses, ForwardPass] | None = None
    """The forward pass, among the backward passes of its model."""

    def fingerprints(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """([n] int64 on the device: see `expert_fingerprints`,) of some rows, or of all; nothing in
        a dense model."""
        if not self.layers:
            return ()
        ids = [each.expert_ids if rows is None else each.expert_ids[rows] for each in self.layers]
        if not is_canonical("router"):
            ids = [each.sort(dim=1).values for each in ids]
        if len(chosen := {each.shape[1] for each in ids}) > 1:
            raise ConsistencyError(
                f"routers of one model chose {' and '.join(map(str, sorted(chosen)))} experts of a "
                "row: a top_k was changed since patch(). Change the config, and patch again."
            )
        return (expert_fingerprints(torch.stack(ids, dim=1)),)


def expert_fingerprints(expert_ids: Tensor) -> Tensor:
    """[R] int64 of expert ids [R, layers, k], ascending in each layer: one number for all experts
    that a row met, a polynomial modulo 2^64. Other experts have it by a chance of about 2^-64."""
    flat = expert_ids.flatten(1).long() + 1
    base = 0x5851F42D4C957F2D  # an odd multiplier of good spread (Knuth's MMIX)
    powers = torch.full((flat.shape[1],), base, dtype=torch.int64, device=flat.device).cumprod(0)
    return (flat * powers).sum(dim=1)


_record: ContextVar[RoutingRecord | None] = ContextVar("routing_record", default=None)


@contextmanager
def recorded_routing(*, logits: bool = False) -> Iterator[RoutingRecord]:
    """Keep the routing of the one forward pass inside the block, in this thread; `logits` too.

    What gradient checkpointing computes again after the block is not kept.
    """
    record = RoutingRecord(logits)
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@contextmanager
def stock_routing(model: nn.Module) -> Iterator[list[Tensor]]:
    """The routing of each forward pass of an unpatched model inside the block: [rows]
    `expert_fingerprints` of all rows, padding too. A dense model gives none."""
    found, layers = list[Tensor](), list[Tensor]()

    def keep(gate: nn.Module, given: object, result: tuple[Tensor, Tensor, Tensor]) -> None:
        layers.append(result[2].sort(dim=1).values)

    def join(*_: object) -> None:
        if layers:
            found.append(expert_fingerprints(torch.stack(layers, dim=1)))
            layers.clear()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                stack.callback(module.register_forward_hook(keep).remove)
        stack.callback(model.register_forward_hook(join).remove)
        yield found


def record_forward(forward: tuple[BackwardPasses, ForwardPass]) -> None:
    """Keep the forward pass itself where a block asks for its routing."""
    if (record := _record.get()) is not None:
        record.forward = forward


def record_routing(logits: Tensor, expert_ids: Tensor) -> None:
    """Keep a layer's routing where a block asks for it."""
    if (record := _record.get()) is not None:
        record.layers.append(Routed(logits if record.keeps_logits else None, expert_ids))
        record.ran_without_gradients |= not torch.is_grad_enabled()


UNIT = 2.0**40
"""Parts of 1 that probabilities are counted in; 2^22 tokens fit in 63 bits."""


def sequence_balance(record: RoutingRecord, layout: PackedSequences) -> Tensor:
    """[S] fp32, the loss of each sequence of the layout, differentiable in the routers' logits.

    ValueError in a dense model, and where the logits' gradients are lost: under gradient
    checkpointing with `use_reentrant`, and where all that they depend on is frozen.
    """
    if not record.layers:
        raise ValueError("a dense model has no experts to balance; leave the balance loss out.")
    if torch.is_grad_enabled():
        if record.ran_without_gradients:
            raise ValueError(
                "the balance loss has no gradient where gradient checkpointing runs with "
                "use_reentrant=True, which hides the routers; use use_reentrant=False."
            )
        if not any(z is not None and z.requires_grad for z, _ in record.layers):
            raise ValueError(
                "the balance loss has no gradient: the routers and all below them are frozen; "
                "leave the balance loss out."
            )
    starts, lens = layout.query_starts, layout.query_lens
    ids = record.layers[0].expert_ids
    sequence = torch.full((len(ids),), len(lens))  # of filler
    for i, (start, length) in enumerate(zip(starts, lens, strict=True)):
        sequence[start : start + length] = i
    tokens = torch.tensor(list(lens), dtype=torch.float32)
    on_device = sequence.to(ids.device), tokens.to(ids.device)
    losses = [BalanceFunction.apply(z, ids, *on_device) for z, ids in record.layers]
    return tree_sum(torch.stack(losses), dim=0) / len(losses)


class BalanceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, expert_ids, sequence, tokens):
        logits = logits.float()
        p = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        p = p / tree_sum(p).unsqueeze(-1)
        experts, top_k = p.shape[1], expert_ids.shape[1]
        sums = torch.zeros(2, len(tokens) + 1, experts, dtype=torch.int64, device=p.device)
        met = torch.zeros_like(p, dtype=torch.int64).scatter_(1, expert_ids.long(), 1)
        sums[0].index_add_(0, sequence, met)
        sums[1].index_add_(0, sequence, (p.double() * UNIT).round().long())
        bad = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=p.device)
        bad.index_add_(0, sequence, (~p.isfinite()).any(dim=1).long())
        # fp64: the integers have more digits than fp32.
        f = sums[0, :-1].double() * experts / (top_k * tokens.double()).unsqueeze(1)
        mean = sums[1, :-1].double() / (UNIT * tokens.double()).unsqueeze(1)
        slope = (f / tokens.double().unsqueeze(1)).float()  # of the loss in p
        ctx.save_for_backward(p, slope, sequence)
        # No integer is NaN.
        return tree_sum((f * mean).float()).masked_fill(bad[:-1] > 0, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):
        p, slope, sequence = ctx.saved_tensors
        weighted = grad_outputs[0].float().unsqueeze(1) * slope
        # Filler has no sequence, and the gradient 0.
        d = torch.cat([weighted, torch.zeros_like(weighted[:1])])[sequence]
        return p * (d - tree_sum(p * d).unsqueeze(-1)), None, None, None
