"""Logprobs of given tokens under a patched model: what training recomputes for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.models.decoder import guarded_backward
from rl_consistency.models.forward import lm_head_weight, packed_hidden_states
from rl_consistency.models.moe import recorded_routing, sequence_balance
from rl_consistency.models.packing import PackedBatch, PaddedBatch, from_host
from rl_consistency.models.patch import patched_session
from rl_consistency.models.scoring.scored_rows import (
    Sampling,
    ScoredRows,
    packed,
    row_scores,
    sampling_rows,
    scored_hidden_states,
    scored_rows,
    scored_tokens,
    scored_under,
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
    mean_logits: Tensor | None = None
    """fp32, mean over the vocabulary of the logits, in no order that is promised; None: not asked.
    """


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
    check_support: bool = True,
) -> TokenLogprobs:
    """Log-probability of each scored token given the tokens before it.

    All forms of a batch give the same bytes, and so did the rollout engine with these weights.
    Only this function gives them: log_softmax of `model(ids).logits` rounds otherwise.

    Args:
        model: patched causal LM, or the outermost wrapper around it.
        sequences: lists of token ids, a padded [B, L] int64 batch, or a `PackedBatch`.
        attention_mask: [B, L] for a left- or right-padded batch; None if nothing is padded.
        prompt_lengths: tokens at the start of each sequence that are not scored.
        loss_mask: instead of prompt_lengths, True at tokens to score, in the form of `sequences` or
            as one list for each. The first token of a sequence has no token before it and cannot be
            scored.
        sampling: what the tokens were sampled with, for all or each; None is temperature 1 without
            truncation, and so is temperature 0 with `greedy_logprobs="full"`.
        share_prompts: compute prompts that several sequences begin with once. Lists of token ids
            with `prompt_lengths`, without gradients; other forms, and models with hooks or an op
            on its stock path, are computed whole. The bits stay.
        balance: also compute the load-balancing loss of each sequence, of a sparse model.
        check_support: refuse a scored token that `sampling` rules out under these weights, which
            waits for the device where it truncates. False, for measurements: it gets -inf, and its
            ratio is 0.

    top_k, top_p, min_p and temperature 0 rule tokens out. After an update, and in a reference
    model, a sampled token may be among them, so a rollout with truncation serves one update and no
    KL to a reference.

    ValueError if the model is not patched or was changed since, shapes disagree, nothing is scored,
    a scored token is ruled out, prompts would be shared under gradients, or an fp16 model would be
    trained; ConsistencyError for a changed numeric setting, or for the inside of a wrapper under
    gradients, which would leave out what the wrapper does.
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
    sharing = share_prompts and not balance
    shared = _shared(policy, sequences, prompt_lengths) if sharing else None

    def run() -> tuple[Tensor, ...]:
        return _scores(policy, batch, scored, sampling, shared, balance)[2]

    logprobs, entropy, *routing = through(model, policy, run)
    if check_support and _truncates(sampling):
        _require_support(logprobs, scored)
    return TokenLogprobs(logprobs, entropy, [int(mask.sum()) for mask in scored], *routing)


def _truncates(sampling: Sampling | Sequence[Sampling] | None) -> bool:
    each = sampling if isinstance(sampling, Sequence) else [] if sampling is None else [sampling]
    narrowed = [s for s in each if scored_under(s)]
    return any(s.temperature == 0 or s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in narrowed)


def _require_support(logprobs: Tensor, scored: list[Tensor]) -> None:
    outside = (logprobs.detach() == -torch.inf).nonzero().squeeze(1).tolist()
    if not outside:
        return
    places = [(i, int(at)) for i, mask in enumerate(scored) for at in mask.nonzero()]
    sequence, token = places[outside[0]]
    raise ValueError(
        f"{len(outside)} of {len(places)} scored tokens, the first token {token} of sequence "
        f"{sequence}, lie outside the support that top_k, top_p, min_p or temperature 0 leaves "
        "under these weights: their logprob is -inf. They were sampled with other weights or "
        "parameters. Take one update on a rollout, and no KL to a reference; or sample and score "
        "without truncation. check_support=False gives -inf."
    )


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


def _scores(
    policy: nn.Module,
    batch: PackedBatch,
    scored: list[Tensor],
    sampling: Sampling | Sequence[Sampling] | None,
    shared: SharedPrompts | None = None,
    balance: bool = False,
) -> tuple[Tensor, ScoredRows, tuple[Tensor, ...]]:
    """Hidden states and rows of the scored tokens, and their logprobs and entropies; behind these
    what a sparse model was routed to, and its load-balancing loss where that is asked for."""
    with recorded_routing(logits=balance) as record:
        if shared is None:
            hidden, rows = scored_hidden_states(policy, batch, scored)
            index = rows.index
        else:
            found, places = shared_hidden_states(policy, shared, batch)
            rows = scored_rows(batch, scored)
            index = places[rows.index]
            hidden = found[index]
    more = record.fingerprints(index[rows.kept])
    if balance:
        # Routers' logits leave the decoder beside its hidden states, whose guard they do not meet.
        more = *more, guarded_backward(sequence_balance(record, batch.layout), record.forward)
    parameters = sampling_rows(sampling, len(scored), rows)
    return hidden, rows, (*row_scores(policy, hidden, rows, parameters), *more)


def label_logprobs(
    policy: nn.Module,
    batch: PaddedBatch,
    input_ids: Tensor,
    labels: Tensor,
    sampling: Sampling | None = None,
    *,
    most_likely: bool = False,
    mean_logits: bool = False,
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
        mean_logits: tell the mean of the logits at each label.

    ValueError if a label is another token. Sequences of one token each give zeros too.
    """
    lens = list(batch.packed.layout.query_lens)
    wanted = labels[batch.mask] != -100
    wanted[from_host(np.cumsum([0, *lens[:-1]]), wanted.device)] = False
    if bool((labels != input_ids)[batch.mask][wanted].any()):
        raise ValueError("labels differ from input_ids; give the tokens themselves, or -100.")
    mask = torch.zeros_like(batch.mask).masked_scatter(batch.mask, wanted)[:, 1:]
    scored = list(wanted.cpu().split(lens))
    if max(lens) == 1:  # there is no row to score
        with recorded_routing() as record:
            hidden = packed_hidden_states(policy, batch.packed)
        zeros = hidden.float().sum() * 0.0 + torch.zeros(mask.shape, device=mask.device)
        routing = torch.zeros_like(mask, dtype=torch.int64) if record.layers else None
        hits = torch.zeros_like(mask) if most_likely else None
        means = torch.zeros_like(zeros) if mean_logits else None
        return LabelLogprobs(zeros, zeros, mask, hits, routing, means)
    if not any(map(torch.any, scored)):
        longest = lens.index(max(lens))
        scored[longest] = torch.arange(lens[longest]) == 1  # for the graph; the mask drops it
    hidden, rows, parts = _scores(policy, batch.packed, scored, sampling)
    logprobs, entropy, *routing = (
        part.new_zeros(mask.shape).masked_scatter(mask, part) for part in parts
    )
    hits = None
    if most_likely:
        greedy = SamplingRows.uniform(len(rows.owners), temperature=0.0, device=hidden.device)
        with torch.no_grad():
            best, _ = row_scores(policy, hidden.detach(), rows, greedy)
        hits = torch.zeros_like(mask).masked_scatter(mask, best == 0)
    means = None
    if mean_logits:
        with torch.no_grad():
            head = lm_head_weight(policy).mean(dim=0, dtype=torch.float32)
            means = hidden[rows.kept].float() @ head
        means = means.new_zeros(mask.shape).masked_scatter(mask, means)
    return LabelLogprobs(logprobs, entropy, mask, hits, *routing, mean_logits=means)
