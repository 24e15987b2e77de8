"""Canonical counterparts of the router, the experts and the block around them.

Transformers' classes of Qwen3-MoE, OLMoE and Mixtral have the same parts: `gate.weight` [E, H],
`experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout
from rl_consistency.kernels.core.compile_ahead import compiles_only
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.models.modules import CanonicalModule, LayerCall
from rl_consistency.models.moe.routing import record_routing
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
