"""Logprobs of given tokens under a patched model: what training recomputes for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED
from rl_consistency.kernels.token_logprobs.op import token_logprobs as scored_rows
from rl_consistency.models.decoder import NO_FP16_TRAINING, guarded_backward
from rl_consistency.models.forward import lm_head_gradient, lm_head_weight, packed_hidden_states
from rl_consistency.models.moe.balance import sequence_balance
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PackedBatch, PaddedBatch, from_host, pack_padded
from rl_consistency.models.patch import patched_session
from rl_consistency.models.sharding import through, unwrapped
from rl_consistency.models.shared_prompts import SharedPrompts, shared_hidden_states
from rl_consistency.models.stock.logprobs import stock_scores
from rl_consistency.numerics.strict import current, is_canonical


class Sampling(Protocol):
    """The parameters a token was sampled with; `SamplingParams` is one."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


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
    batch, lens = _pack(policy, sequences, attention_mask)
    context: int = policy.config.max_position_embeddings  # type: ignore[union-attr, assignment]
    if max(lens) > context:
        raise ValueError(
            f"sequence {lens.index(max(lens))} has {max(lens)} tokens, the model's context is "
            f"{context} (max_position_embeddings); shorten it."
        )
    if isinstance(loss_mask, Tensor) and loss_mask.shape != _shape(sequences, lens):
        shape = tuple(loss_mask.shape)
        raise ValueError(f"loss_mask {shape} does not fit the batch: give the shape of sequences.")
    scored = _scored_tokens(lens, prompt_lengths, loss_mask, attention_mask)
    shared = None
    if share_prompts and not balance:
        shared = _shared(policy, sequences, prompt_lengths)
    if shared is None:
        run = partial(_score, policy, batch, lens, scored, sampling, balance)
    else:
        run = partial(_score_shared, policy, shared, batch, lens, scored, sampling)
    logprobs, entropy, *routing = through(model, policy, run)
    return TokenLogprobs(logprobs, entropy, [int(mask.sum()) for mask in scored], *routing)


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

    ValueError if a label is another token, or no sequence has a second token.
    """
    lens = list(batch.packed.layout.query_lens)
    wanted = labels[batch.mask] != -100
    wanted[from_host(np.cumsum([0, *lens[:-1]]), wanted.device)] = False
    if bool((labels != input_ids)[batch.mask][wanted].any()):
        raise ValueError("labels differ from input_ids; give the tokens themselves, or -100.")
    mask = torch.zeros_like(batch.mask).masked_scatter(batch.mask, wanted)[:, 1:]
    scored = list(wanted.cpu().split(lens))
    if not any(map(torch.any, scored)):
        longest = lens.index(max(lens))
        scored[longest] = torch.arange(lens[longest]) == 1  # for the graph; the mask drops it
    with recorded_routing() as record:
        hidden, rows = _scored_hidden_states(policy, batch.packed, lens, scored)
    parts = _row_scores(policy, hidden, rows, _sampling_rows(sampling, lens, rows))
    parts = *parts, *record.fingerprints(rows.index[rows.kept])
    found = [p.new_zeros(mask.shape).masked_scatter(mask, p) for p in parts]
    logprobs, entropy, routing = found if len(found) == 3 else (*found, None)
    if not most_likely:
        return LabelLogprobs(logprobs, entropy, mask, None, routing)
    greedy = SamplingRows.uniform(len(rows.owners), temperature=0.0, device=hidden.device)
    with torch.no_grad():
        best, _ = _row_scores(policy, hidden.detach(), rows, greedy)
    hits = torch.zeros_like(mask).masked_scatter(mask, best == 0)
    return LabelLogprobs(logprobs, entropy, mask, hits, routing)


def _score(
    policy: nn.Module,
    batch: PackedBatch,
    lens: list[int],
    scored: list[Tensor],
    sampling: Sampling | Sequence[Sampling] | None,
    balance: bool,
) -> tuple[Tensor, ...]:
    with recorded_routing(logits=balance) as record:
        hidden, rows = _scored_hidden_states(policy, batch, lens, scored)
    found = record.fingerprints(rows.index[rows.kept])
    if balance:
        # Routers' logits leave the decoder beside its hidden states, whose guard they do not meet.
        passes, forward = record.forward or (None, None)
        balances = sequence_balance(record, batch.layout)
        found = *found, guarded_backward(balances, passes, forward)
    return *_row_scores(policy, hidden, rows, _sampling_rows(sampling, lens, rows)), *found


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
    rows = _scored_rows(batch, scored)
    # Where the rows of the whole sequences lie among those of the parts; filler has any row.
    places = np.zeros(len(batch.input_ids), dtype=np.int64)
    for i, (start, n) in enumerate(zip(batch.layout.query_starts, lens, strict=True)):
        places[start : start + n] = shared.rows_of(starts, i)
    index = from_host(places, hidden.device)[rows.index]
    scores = _row_scores(policy, hidden[index], rows, _sampling_rows(sampling, lens, rows))
    return *scores, *record.fingerprints(index[rows.kept])


def _scored_hidden_states(
    policy: nn.Module, batch: PackedBatch, lens: list[int], scored: list[Tensor]
) -> tuple[Tensor, _Rows]:
    hidden = packed_hidden_states(policy, batch)
    if hidden.dtype == torch.float16 and hidden.requires_grad:
        raise ValueError(NO_FP16_TRAINING)
    rows = _scored_rows(batch, scored)
    return hidden[rows.index], rows


def _row_scores(
    policy: nn.Module, hidden: Tensor, rows: _Rows, parameters: SamplingRows
) -> tuple[Tensor, Tensor]:
    given = (hidden, lm_head_weight(policy), rows.targets, parameters)
    if is_canonical("token_logprobs"):
        logprobs, entropy = scored_rows(
            *given, weight_grad=lm_head_gradient(policy), check_targets=False
        )
    else:
        logprobs, entropy = stock_scores(*given)
    logprobs, entropy = guarded_backward(logprobs), guarded_backward(entropy)
    return logprobs[rows.kept], entropy[rows.kept]


class _Rows(NamedTuple):
    index: Tensor  # [M] packed row that predicts each target; a multiple of 16 per sequence
    targets: Tensor  # [M] int64, `IGNORED` in rows of filler
    kept: Tensor  # [N] which of the M rows are real
    owners: list[int]  # [M] sequence of each


def _pack(
    model: nn.Module,
    sequences: Sequence[Sequence[int]] | Tensor | PackedBatch,
    attention_mask: Tensor | None,
) -> tuple[PackedBatch, list[int]]:
    if isinstance(sequences, Tensor):
        batch = pack_padded(sequences, attention_mask).packed
    elif attention_mask is not None:
        raise ValueError("attention_mask goes with a padded tensor; lists need none.")
    elif isinstance(sequences, PackedBatch):
        batch = sequences
    else:
        batch = PackedBatch.from_sequences(sequences, next(model.parameters()).device)
    return batch, list(batch.layout.query_lens)


def _shape(sequences: Any, lens: list[int]) -> tuple[int, ...] | None:
    """The shape of sequences given as a tensor, or all as long; None: they have none."""
    if isinstance(sequences, Tensor):
        return tuple(sequences.shape)
    if isinstance(sequences, PackedBatch):
        return (sum(lens),)
    return (len(lens), lens[0]) if len(set(lens)) == 1 else None


def _scored_tokens(
    lens: list[int],
    prompt_lengths: Sequence[int] | None,
    loss_mask: Sequence[Sequence[bool]] | Tensor | None,
    attention_mask: Tensor | None,
) -> list[Tensor]:
    """For each sequence [len] bool, which tokens are scored; on the CPU."""
    if (prompt_lengths is None) == (loss_mask is None):
        raise ValueError("give exactly one of prompt_lengths and loss_mask.")
    if prompt_lengths is None:
        return _masks(lens, loss_mask, attention_mask)
    if len(prompt_lengths) != len(lens):
        raise ValueError(f"{len(prompt_lengths)} prompt_lengths for {len(lens)} sequences.")
    pairs = list(zip(prompt_lengths, lens, strict=True))
    for i, (prompt, length) in enumerate(pairs):
        if not 1 <= prompt <= length:
            raise ValueError(
                f"prompt_lengths[{i}] is {prompt}; allowed: 1 to {length}, the sequence's length "
                "(the first token has nothing before it)."
            )
    return [torch.arange(length) >= prompt for prompt, length in pairs]


def _masks(lens: list[int], loss_mask: Any, attention_mask: Tensor | None) -> list[Tensor]:
    if isinstance(loss_mask, Tensor):
        real = torch.ones_like(loss_mask) if attention_mask is None else attention_mask
        masks = list(loss_mask.cpu()[real.bool().cpu()].bool().split(lens))
    else:
        masks = [torch.as_tensor(mask, dtype=torch.bool, device="cpu") for mask in loss_mask]
    if len(masks) != len(lens):
        raise ValueError(f"loss_mask has {len(masks)} entries for {len(lens)} sequences.")
    for i, (mask, length) in enumerate(zip(masks, lens, strict=True)):
        if len(mask) != length or bool(mask[0]):
            raise ValueError(
                f"loss_mask {i} has {len(mask)} entries for {length} tokens, or scores the first "
                "token, which has nothing before it."
            )
    return masks


def _scored_rows(batch: PackedBatch, scored: list[Tensor]) -> _Rows:
    """Rows to score, their owners, and which of them are real.

    Filler rows bring each sequence to a multiple of the fold's step, so that the LM head's gradient
    can be cut between any two sequences. They repeat the first row and have an ignored target.
    """
    index: list[np.ndarray] = []
    real: list[np.ndarray] = []
    owners: list[int] = []
    for i, (start, mask) in enumerate(zip(batch.layout.query_starts, scored, strict=True)):
        rows = np.flatnonzero(mask.numpy()) + (start - 1)
        if len(rows) == 0:
            continue
        filler = -len(rows) % STEP
        index.append(np.concatenate([rows, np.full(filler, rows[0])]))
        real.append(np.arange(len(rows) + filler) < len(rows))
        owners += [i] * (len(rows) + filler)
    if not index:
        raise ValueError("no token is scored; the prompts or the loss mask leave none.")
    device = batch.input_ids.device
    kept = np.concatenate(real)
    rows = from_host(np.concatenate(index), device)
    targets = batch.input_ids[rows + 1].masked_fill(from_host(~kept, device), IGNORED)
    return _Rows(rows, targets, from_host(np.flatnonzero(kept), device), owners)


def _sampling_rows(
    sampling: Sampling | Sequence[Sampling] | None, lens: list[int], rows: _Rows
) -> SamplingRows:
    device = rows.index.device
    if sampling is None:
        return SamplingRows.uniform(len(rows.owners), device=device)
    if not isinstance(sampling, Sequence):
        return _uniform(sampling, len(rows.owners), device)
    if len(sampling) != len(lens):
        raise ValueError(f"{len(sampling)} sampling parameters for {len(lens)} sequences.")
    per_sequence = SamplingRows.concatenate([_uniform(s, 1, device) for s in sampling])
    return per_sequence.select(from_host(np.asarray(rows.owners), device))


def _uniform(sampling: Sampling, count: int, device: torch.device) -> SamplingRows:
    names = ("temperature", "top_k", "top_p", "min_p")
    if not all(hasattr(sampling, name) for name in names):
        raise TypeError(f"sampling: {type(sampling).__name__}; give SamplingParams for each.")
    fields = {name: getattr(sampling, name) for name in names}
    return SamplingRows.uniform(count, **fields, device=device)


class CompletionStates(NamedTuple):
    hidden: Tensor  # [M, H] of the row before each completion token, and of rows of filler
    kept: Tensor  # [N] which of the M rows are real
    lengths: list[int]  # completion tokens of each sequence


def completion_states(
    policy: nn.Module,
    sequences: Sequence[Sequence[int]] | Tensor | PackedBatch,
    prompt_lengths: Sequence[int],
    attention_mask: Tensor | None = None,
) -> CompletionStates:
    """What a head reads that says something of each completion token, from those before it.

    A head's gradient is a fold over all M rows, which can be cut between any two sequences.
    """
    batch, lens = _pack(policy, sequences, attention_mask)
    scored = _scored_tokens(lens, prompt_lengths, None, attention_mask)
    rows = _scored_rows(batch, scored)
    hidden = packed_hidden_states(policy, batch)[rows.index]
    return CompletionStates(hidden, rows.kept, [int(mask.sum()) for mask in scored])
