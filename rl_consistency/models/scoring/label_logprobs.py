"""`token_logprobs` at the labels of a padded batch, as trainers ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PaddedBatch, from_host
from rl_consistency.models.scoring.scored_rows import (
    Sampling,
    row_scores,
    sampling_rows,
    scored_hidden_states,
)


@dataclass(frozen=True, eq=False)
class LabelLogprobs:
    """Scores at the labels of a padded batch: column j holds that of token j + 1, all [B, L-1].

    Labels [[-100, 5, 6]] of tokens [[4, 5, 6]] give two scores.
    """

    logprobs: Tensor
    """fp32, differentiable, zeros where the mask is False."""
    entropy: Tensor
    """fp32, entropy of the distribution each label is drawn from; zeros where the mask is False."""
    mask: Tensor
    """bool, where a label was scored."""
    most_likely: Tensor | None
    """bool, where the label has the largest logit (the lowest id of several); None: not asked."""
    routing: Tensor | None = None
    """int64, `expert_fingerprints` of the rows that give the scores; None in a dense model."""


def label_logprobs(
    policy: nn.Module,
    batch: PaddedBatch,
    input_ids: Tensor,
    labels: Tensor,
    sampling: Sampling | None = None,
    *,
    most_likely: bool = False,
) -> LabelLogprobs:
    """`token_logprobs` of a trainer's labels, from inside the policy's own forward pass.

    Args:
        policy: patched causal LM; wrappers around it have been passed.
        batch: `packed_inputs` of the call.
        input_ids: [B, L].
        labels: [B, L], the token itself where it is scored and -100 elsewhere. The first token of
            a sequence is never scored. Without any label the result is a differentiable zero.
        sampling: what the tokens were sampled with; None is temperature 1 without truncation.
        most_likely: tell whether each label has the largest logit.

    ValueError if a label is another token. Sequences of one token each give zeros too.
    """
    lens = list(batch.packed.layout.query_lens)
    wanted = labels[batch.mask] != -100
    wanted[from_host(np.cumsum([0, *lens[:-1]]), wanted.device)] = False
    if bool((labels != input_ids)[batch.mask][wanted].any()):
        raise ValueError("labels differ from input_ids; give the tokens themselves, or -100.")
    mask = torch.zeros_like(batch.mask).masked_scatter(batch.mask, wanted)[:, 1:]
    scored = list(wanted.cpu().split(lens))
    if max(lens) == 1:
        return _none_scored(policy, batch, mask, most_likely)
    if not any(map(torch.any, scored)):
        longest = lens.index(max(lens))
        scored[longest] = torch.arange(lens[longest]) == 1  # for the graph; the mask drops it
    with recorded_routing() as record:
        hidden, rows = scored_hidden_states(policy, batch.packed, scored)
    parts = row_scores(policy, hidden, rows, sampling_rows(sampling, lens, rows))
    parts = *parts, *record.fingerprints(rows.index[rows.kept])
    found = [p.new_zeros(mask.shape).masked_scatter(mask, p) for p in parts]
    logprobs, entropy, routing = found if len(found) == 3 else (*found, None)
    if not most_likely:
        return LabelLogprobs(logprobs, entropy, mask, None, routing)
    greedy = SamplingRows.uniform(len(rows.owners), temperature=0.0, device=hidden.device)
    with torch.no_grad():
        best, _ = row_scores(policy, hidden.detach(), rows, greedy)
    hits = torch.zeros_like(mask).masked_scatter(mask, best == 0)
    return LabelLogprobs(logprobs, entropy, mask, hits, routing)


def _none_scored(
    policy: nn.Module, batch: PaddedBatch, mask: Tensor, most_likely: bool
) -> LabelLogprobs:
    """Differentiable zeros of a batch whose sequences have one token each."""
    with recorded_routing() as record:
        hidden = packed_hidden_states(policy, batch.packed)
    zeros = hidden.float().sum() * 0.0 + torch.zeros(mask.shape, device=mask.device)
    routing = [torch.zeros_like(mask, dtype=torch.int64)] if record.layers else []
    hits = torch.zeros_like(mask) if most_likely else None
    return LabelLogprobs(zeros, zeros, mask, hits, *routing)
