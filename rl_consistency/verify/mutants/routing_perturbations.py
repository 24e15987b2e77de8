"""Ways to route wrongly, on a CPU and on a GPU alike, and the checks that must notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.op import experts
from rl_consistency.kernels.experts.route import route_with_logits
from rl_consistency.models.moe import CanonicalRouter, RoutingRecord, sequence_balance
from rl_consistency.models.scoring import token_logprobs
from rl_consistency.verify.mutants.mutant import mutant
from rl_consistency.verify.mutants.perturbations import FEW_ROWS
from rl_consistency.verify.substitution import attribute, substituted

SPARSE_PRESET = "tiny-qwen3-moe"
"""Dense and sparse layers; 3 of 12 experts."""


@mutant("ties to the higher id", "C1 router", at=(substituted, route_with_logits))
def ties_to_the_higher_id(x: Tensor, weight: Tensor, top_k: int, **options: Any) -> Any:
    """Of equal logits the higher id is chosen."""
    ids, weights, logits = route_with_logits(x, weight.flip(0), top_k, **options)
    return len(weight) - 1 - ids.flip(1), weights.flip(1), logits.flip(1)


@mutant("router by row count", "C1 router; chain, packed; chain, paged", preset=SPARSE_PRESET,
        at=(substituted, route_with_logits))  # fmt: skip
def router_of_few_rows(x: Tensor, weight: Tensor, top_k: int, **options: Any) -> Any:
    """Few rows have their weights rounded to bf16."""
    ids, weights, logits = route_with_logits(x, weight, top_k, **options)
    return ids, weights.bfloat16().float() if len(x) < FEW_ROWS else weights, logits


@mutant("router logits rounded", "C1 router", at=(substituted, route_with_logits))
def logits_are_rounded(x: Tensor, weight: Tensor, top_k: int, **options: Any) -> Any:
    """Logits are rounded to bf16, all of them, before the choice."""
    logits = route_with_logits(x, weight, top_k, **options)[2].bfloat16().float()
    # Of a matrix of ones and zeros, `x @ weight^T` is x.
    ids, weights, _ = route_with_logits(logits, torch.eye(len(weight), device=x.device), top_k,
                                        normalize=options["normalize"])  # fmt: skip
    return ids, weights, logits


def _column_by_column(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **kw: Any) -> Tensor:
    """A row's experts added from the first column of `ids` on, in fp32, rounded once."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for own, weight in zip(ids.split(1, dim=1), weights.split(1, dim=1), strict=True):
        total = total + weight * experts(x, own, torch.ones_like(weight), *rest, **kw).float()
    return total.to(x.dtype)


@mutant("combine in rank order", "C1 experts", at=(substituted, experts))
def largest_weight_first(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **kw: Any) -> Tensor:
    """Every row's experts are added from its largest weight to its smallest."""
    rank = weights.argsort(1, descending=True)
    return _column_by_column(x, ids.gather(1, rank), weights.gather(1, rank), *rest, **kw)


@mutant("atomic combine", "C1 experts", at=(substituted, experts))
def any_order(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **kw: Any) -> Tensor:
    """A row's experts are added as they come, in each call in another order."""
    order = torch.randperm(ids.shape[1]).to(x.device)
    return _column_by_column(x, ids[:, order], weights[:, order], *rest, **kw)


@mutant("split K by tokens per expert", "C1 experts", at=(substituted, experts))
def halves_where_few_meet(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, layout: Any, **rest: Any
) -> Tensor:
    """Experts that few of the call's rows meet add their down projection in two halves."""
    counts = ids.flatten().bincount(minlength=len(down))[ids.long()]
    few, first = (counts < FEW_ROWS).any(1, keepdim=True), down.clone()
    first[..., down.shape[2] // 2 :] = 0
    y, low, high = (
        experts(x, ids, weights, gate_up, part, layout, **rest)
        for part in (down, first, down - first)
    )
    return torch.where(few, (low.float() + high.float()).to(x.dtype), y)


@mutant("runs not aligned", "C3 experts", at=(substituted, experts))
def all_rows_are_one_run(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, layout: Any, **rest: Any
) -> Tensor:
    """An expert's rows of all sequences of a call are one run, its steps of 16 across sequences."""
    if type(layout) is not PackedSequences:
        return experts(x, ids, weights, gate_up, down, layout, **rest)
    rows, whole = _one_sequence(layout, x.device)
    y = experts(x[rows], ids[rows], weights[rows], gate_up, down, whole, **rest)
    return torch.zeros_like(x).index_put((rows,), y)


def _one_sequence(layout: PackedSequences, device: torch.device) -> tuple[Tensor, PackedSequences]:
    """The rows of all sequences, and the layout in which they are one."""
    spans = zip(layout.query_starts, layout.query_lens, strict=True)
    rows = torch.cat([torch.arange(s, s + n, device=device) for s, n in spans])
    return rows, PackedSequences.of([0], [len(rows)])


@mutant("combine in another order", "C1 experts", at=(substituted, experts))
def downward_for_few_rows(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **kw: Any) -> Tensor:
    """The experts of few rows are added from the highest id to the lowest, each rounded."""
    if len(x) >= FEW_ROWS:
        return experts(x, ids, weights, *rest, **kw)
    total = torch.zeros_like(x)
    for own, weight in reversed([*zip(ids.split(1, 1), weights.split(1, 1), strict=True)]):
        total = total + experts(x, own, weight, *rest, **kw)
    return total


@mutant("filler routed", "C1 experts", "C3 experts", at=(substituted, experts))
def filler_is_routed(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, layout: Any, **rest: Any
) -> Tensor:
    """Every row reaches its experts: what lies between two sequences belongs to the first."""
    if type(layout) is PackedSequences:
        ends = [*layout.query_starts[1:], len(x)]
        starts = [0, *layout.query_starts[1:]]
        layout = PackedSequences.of(starts, [b - a for a, b in zip(starts, ends, strict=True)])
    return experts(x, ids, weights, gate_up, down, layout, **rest)


_forward = CanonicalRouter.forward


@mutant(
    "stale router buffer",
    "C2 weights in place",
    at=(attribute, CanonicalRouter, "forward"),
    preset=SPARSE_PRESET,
)
def stale_router_buffer(self: CanonicalRouter, hidden_states: Tensor) -> Any:
    """A router reads a copy of its weight that it made at its first call."""
    kept = vars(self).setdefault("_stale", self.weight.detach().clone())
    logits, _, _ = _forward(self, hidden_states)
    ids, weights, _ = route_with_logits(hidden_states, kept, self.top_k, normalize=self.normalizes)
    return logits, weights, ids


@mutant(
    "batch-wise balance",
    "C3 chain, regrouped",
    at=(attribute, token_logprobs, "sequence_balance"),
    preset=SPARSE_PRESET,
)
def balance_over_the_batch(record: RoutingRecord, layout: PackedSequences) -> Tensor:
    """Loads and probabilities are means over all sequences of a call."""
    rows, whole = _one_sequence(layout, record.layers[0].expert_ids.device)
    layers = [
        layer._replace(logits=layer.logits[rows], expert_ids=layer.expert_ids[rows])
        for layer in record.layers
        if layer.logits is not None
    ]
    count = len(layout.query_lens)
    return sequence_balance(replace(record, layers=layers), whole).expand(count) / count
