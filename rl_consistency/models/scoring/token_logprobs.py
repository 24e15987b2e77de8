"""Logprobs of given tokens under a patched model: what training recomputes for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_consistency.models.decoder import guarded_backward
from rl_consistency.models.moe.balance import sequence_balance
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PackedBatch, from_host
from rl_consistency.models.patch import patched_session
from rl_consistency.models.scoring.scored_rows import (
    Sampling,
    packed,
    row_scores,
    sampling_rows,
    scored_hidden_states,
    scored_rows,
    scored_tokens,
)
from rl_consistency.models.scoring.shared_prompts import SharedPrompts, shared_hidden_states
from rl_consistency.models.sharding import through, unwrapped
from rl_consistency.numerics.strict import current


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Scored tokens, sequence by sequence: 5 and 4 tokens, of which 3 and 2 are the prompts, give 4
    logprobs and lengths [2, 2]."""

    logprobs: Tensor
    """[N] fp32, differentiable."""
    entropy: Tensor
    """[N] fp32 entropy of the sampling distribution at each scored token, differentiable."""
    lengths: list[int]
    """Scored tokens of each sequence."""
    routing: Tensor | None = None
    """[N] int64, `expert_fingerprints` of the tokens' rows; None in a dense model."""
    balance: Tensor | None = None
    """[S] fp32, `sequence_balance`, differentiable; None: not asked. Add it to the loss: a backward
    pass of its own would be a second one of the same forward."""

    def split(self) -> list[Tensor]:
        """Logprobs of each sequence."""
        return list(self.logprobs.split(self.lengths))


@torch.compiler.disable()  # a compiler would rewrite the ops, with other bytes on a CPU
def token_logprobs(
    model: nn.Module,
    sequences: Sequence[Sequence[int]] | Tensor | PackedBatch,
    *,
    attention_mask: Tensor | None = None,
    prompt_lengths: Sequence[int] | None = None,
    loss_mask: Sequence[Sequence[bool]] | Tensor | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    share_prompts: bool = False,
    balance: bool = False,
) -> TokenLogprobs:
    """Log-probability of each scored token given the tokens before it.

    All forms of a batch give the same bytes, and so did the rollout engine with these weights.

    Args:
        model: patched causal LM, or the outermost wrapper around it.
        sequences: lists of token ids, a padded [B, L] int64 batch, or a `PackedBatch`.
        attention_mask: [B, L] for a left- or right-padded batch; None if nothing is padded.
        prompt_lengths: tokens at the start of each sequence that are not scored.
        loss_mask: instead of prompt_lengths, True at tokens to score, in the form of `sequences` or
            as one list for each. The first token of a sequence has no token before it and cannot be
            scored.
        sampling: what the tokens were sampled with, for all or each; None is temperature 1 without
            truncation.
        share_prompts: compute prompts that several sequences begin with once. Lists of token ids
            with `prompt_lengths`, without gradients; other forms, and models with hooks or an op
            on its stock path, are computed whole. The bits stay.
        balance: also compute the load-balancing loss of each sequence, of a sparse model.

    ValueError if the model is not patched or was changed since, shapes disagree, nothing is scored,
    prompts would be shared under gradients, or an fp16 model would be trained; ConsistencyError for
    a changed numeric setting, or for the inside of a wrapper under gradients, which would leave out
    what the wrapper does.
    """
    policy = unwrapped(model)
    batch, lens = packed(policy, sequences, attention_mask)
    context: int = policy.config.max_position_embeddings  # type: ignore[union-attr, assignment]
    if max(lens) > context:
        raise ValueError(
            f"sequence {lens.index(max(lens))} has {max(lens)} tokens, the model's context is "
            f"{context} (max_position_embeddings); shorten it."
        )
    scored = scored_tokens(sequences, lens, prompt_lengths, loss_mask, attention_mask)
    shared = None
    if share_prompts and not balance:
        shared = _shared(policy, sequences, prompt_lengths)
    if shared is None:
        run = partial(_score, policy, batch, lens, scored, sampling, balance)
    else:
        run = partial(_score_shared, policy, shared, batch, lens, scored, sampling)
    logprobs, entropy, *routing = through(model, policy, run)
    return TokenLogprobs(logprobs, entropy, [int(mask.sum()) for mask in scored], *routing)


def _score(
    policy: nn.Module,
    batch: PackedBatch,
    lens: list[int],
    scored: list[Tensor],
    sampling: Sampling | Sequence[Sampling] | None,
    balance: bool,
) -> tuple[Tensor, ...]:
    with recorded_routing(logits=balance) as record:
        hidden, rows = scored_hidden_states(policy, batch, scored)
    found = record.fingerprints(rows.index[rows.kept])
    if balance:
        # Routers' logits leave the decoder beside its hidden states, whose guard they do not meet.
        passes, forward = record.forward or (None, None)
        balances = sequence_balance(record, batch.layout)
        found = *found, guarded_backward(balances, passes, forward)
    return *row_scores(policy, hidden, rows, sampling_rows(sampling, lens, rows)), *found


def _shared(
    policy: nn.Module, sequences: Any, prompt_lengths: Sequence[int] | None
) -> SharedPrompts | None:
    """How sequences share their prompts; None where they are computed whole."""
    if torch.is_grad_enabled():
        raise ValueError(
            "share_prompts under gradients: a prompt's gradient is a sum over all its sequences, "
            "which has another order. Score under torch.no_grad(), or leave it out."
        )
    if isinstance(sequences, Tensor | PackedBatch) or prompt_lengths is None or current().stock:
        return None
    if patched_session(policy).check().hooked:
        return None  # a hook may tell a part from a sequence
    return SharedPrompts.of(sequences, prompt_lengths)


def _score_shared(
    policy: nn.Module,
    shared: SharedPrompts,
    batch: PackedBatch,
    lens: list[int],
    scored: list[Tensor],
    sampling: Sampling | Sequence[Sampling] | None,
) -> tuple[Tensor, ...]:
    with recorded_routing() as record:
        hidden, starts = shared_hidden_states(policy, shared)
    rows = scored_rows(batch, scored)
    # Where the rows of the whole sequences lie among those of the parts; filler has any row.
    places = np.zeros(len(batch.input_ids), dtype=np.int64)
    for i, (start, n) in enumerate(zip(batch.layout.query_starts, lens, strict=True)):
        places[start : start + n] = shared.rows_of(starts, i)
    index = from_host(places, hidden.device)[rows.index]
    scores = row_scores(policy, hidden[index], rows, sampling_rows(sampling, lens, rows))
    return *scores, *record.fingerprints(index[rows.kept])
