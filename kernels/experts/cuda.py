"""The experts of rows on CUDA: which kernels run, one after another; nothing waits for the host.

Shapes, dtypes, order, invariance, errors: those of `experts`. Cost: see each file of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout
from rl_consistency.kernels.experts import library
from rl_consistency.kernels.experts.fold_triton import Runs, expert_fold_op, find_runs
from rl_consistency.kernels.experts.pairs_triton import (
    activate_pairs,
    expert_combine_op,
    expert_pair_bwd_op,
    expert_pairs_op,
    gather_rows,
)
from rl_consistency.kernels.experts.products_triton import expert_gate_up_op, expert_product_op


@dataclass(eq=False)
class RoutedRows:
    """The pairs of a call: see `expert_pairs_op`."""

    expert_ids: Tensor
    layout: AttentionLayout
    experts: int
    pairs: Tensor
    places: Tensor
    first: Tensor

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]

    @cached_property
    def runs(self) -> Runs:
        """The steps of both folds."""
        return find_runs(self.expert_ids, self.places, self.layout, self.experts)


def experts_fwd(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    layout: AttentionLayout,
    activation: str,
    recorded: bool,
) -> tuple[Tensor, Tensor, RoutedRows]:
    """y [R, H]; gate and up of each pair, empty unless they are `recorded` or the library computed
    them; the pairs, for the backward pass."""
    numbers, experts = layout.tables(x.device), len(down)
    pairs, places, first = expert_pairs_op(expert_ids, numbers.query_start, numbers.tokens, experts)
    routed = RoutedRows(expert_ids, layout, experts, pairs, places, first)
    if x.shape[0] == 0:
        return torch.empty_like(x), x.new_empty((0, gate_up.shape[1])), routed
    if library.takes(gate_up, "nt", len(pairs)):
        gathered = gather_rows(x, pairs, first, routed.top_k)
        packed = library.grouped_product(gathered, gate_up, "nt", first)
        activated = activate_pairs(packed, first, activation)
    else:
        activated, packed = expert_gate_up_op(
            x, gate_up, first, pairs, routed.top_k, activation, recorded
        )
    outputs = _product(activated, down, "nt", routed, by_row=False)
    return expert_combine_op(outputs, places, weights), packed, routed


def _product(
    a: Tensor, weights: Tensor, layout: Literal["nt", "nn"], routed: RoutedRows, by_row: bool
) -> Tensor:
    """a times the weights of each pair's expert, by the library or by our own kernel; `by_row`: a
    has a row for each row of the call, not one for each pair."""
    pairs, first, top_k = routed.pairs, routed.first, routed.top_k
    if not library.takes(weights, layout, len(pairs)):
        return expert_product_op(a, weights, layout, first, pairs, top_k, by_row)
    if by_row:
        a = gather_rows(a, pairs, first, top_k)
    return library.grouped_product(a, weights, layout, first)


def experts_bwd(
    dy: Tensor,
    routed: RoutedRows,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    packed: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [R, H], dweights [R, k]; the gradients of gate and up and the weighted activation of each
    pair; from dy [R, H] and what the forward pass kept."""
    if dy.shape[0] == 0:
        return dy, weights, packed, packed[:, : down.shape[2]]
    u = _product(dy, down, "nn", routed, by_row=True)
    dpacked, weighted, dweights = expert_pair_bwd_op(
        packed, u, weights, routed.first, routed.pairs, activation
    )
    dx = _product(dpacked, gate_up, "nn", routed, by_row=False)
    return expert_combine_op(dx, routed.places, None), dweights, dpacked, weighted


def fold(
    buffer: Tensor, dy: Tensor, x: Tensor, routed: RoutedRows, *, dy_by_row: bool, fresh: bool
) -> None:
    """Continue `buffer` [E, N, K] over the runs: see `fold_runs`."""
    expert_fold_op(buffer, dy, x, *routed.runs, dy_by_row, fresh)
