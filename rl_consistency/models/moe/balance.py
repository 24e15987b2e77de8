"""The load-balancing loss of each sequence by itself: a sum over sequences, so no cut moves a bit.

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

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core.autograd import once_differentiable
from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.models.moe.routing import RoutingRecord

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
