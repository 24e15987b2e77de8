"""The tokens of a batch that are scored, the rows that predict them, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED, token_logprobs
from rl_consistency.models.decoder import NO_FP16_TRAINING, guarded_backward
from rl_consistency.models.forward import lm_head_gradient, lm_head_weight, packed_hidden_states
from rl_consistency.models.packing import PackedBatch, from_host, pack_padded
from rl_consistency.models.stock import stock_scores
from rl_consistency.numerics.strict import is_canonical


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


class ScoredRows(NamedTuple):
    """Rows of a packed batch that predict scored tokens, and filler between sequences."""

    index: Tensor  # [M] packed row that predicts each target; a multiple of 16 per sequence
    targets: Tensor  # [M] int64, `IGNORED` in rows of filler
    kept: Tensor  # [N] which of the M rows are real
    owners: list[int]  # [M] sequence of each


def packed(
    model: nn.Module,
    sequences: Sequence[Sequence[int]] | Tensor | PackedBatch,
    attention_mask: Tensor | None,
) -> tuple[PackedBatch, list[int]]:
    """Any form of a batch, packed, and the length of each sequence."""
    if isinstance(sequences, Tensor):
        batch = pack_padded(sequences, attention_mask).packed
    elif attention_mask is not None:
        raise ValueError("attention_mask goes with a padded tensor; lists need none.")
    elif isinstance(sequences, PackedBatch):
        batch = sequences
    else:
        batch = PackedBatch.from_sequences(sequences, next(model.parameters()).device)
    return batch, list(batch.layout.query_lens)


def scored_tokens(
    sequences: Any,
    lens: list[int],
    prompt_lengths: Sequence[int] | None,
    loss_mask: Sequence[Sequence[bool]] | Tensor | None,
    attention_mask: Tensor | None,
) -> list[Tensor]:
    """For each sequence [len] bool, which tokens are scored; on the CPU.

    ValueError unless exactly one of `prompt_lengths` and `loss_mask` is given, and fits.
    """
    if (prompt_lengths is None) == (loss_mask is None):
        raise ValueError("give exactly one of prompt_lengths and loss_mask.")
    if prompt_lengths is None:
        if isinstance(loss_mask, Tensor) and loss_mask.shape != _shape(sequences, lens):
            shape = tuple(loss_mask.shape)
            raise ValueError(f"loss_mask {shape} does not fit the batch: give sequences' shape.")
        return _masks(lens, loss_mask, attention_mask)
    if len(prompt_lengths) != len(lens):
        raise ValueError(f"{len(prompt_lengths)} prompt_lengths for {len(lens)} sequences.")
    pairs = list(zip(prompt_lengths, lens, strict=True))
    for i, (prompt, length) in enumerate(pairs):
        if not isinstance(prompt, SupportsIndex):
            raise TypeError(f"prompt_lengths[{i}] is {prompt!r}; give integers.")
        if not 1 <= prompt <= length:
            raise ValueError(
                f"prompt_lengths[{i}] is {prompt}; allowed: 1 to {length}, the sequence's length "
                "(the first token has nothing before it)."
            )
    return [torch.arange(length) >= prompt for prompt, length in pairs]


def _shape(sequences: Any, lens: list[int]) -> tuple[int, ...] | None:
    """The shape of sequences given as a tensor, or all as long; None: they have none."""
    if isinstance(sequences, Tensor):
        return tuple(sequences.shape)
    if isinstance(sequences, PackedBatch):
        return (sum(lens),)
    return (len(lens), lens[0]) if len(set(lens)) == 1 else None


def _masks(lens: list[int], loss_mask: Any, attention_mask: Tensor | None) -> list[Tensor]:
    if isinstance(loss_mask, Tensor):
        real = torch.ones_like(loss_mask) if attention_mask is None else attention_mask
        given = list(loss_mask.cpu()[real.bool().cpu()].split(lens))
    else:
        given = [torch.as_tensor(mask, device="cpu") for mask in loss_mask]
    masks = [mask.bool() for mask in given]
    if len(masks) != len(lens):
        raise ValueError(f"loss_mask has {len(masks)} entries for {len(lens)} sequences.")
    for i, (mask, entries, length) in enumerate(zip(masks, given, lens, strict=True)):
        for found in entries[mask.to(entries.dtype) != entries].tolist():
            raise ValueError(
                f"loss_mask {i} has the entry {found}; give True or 1 where a token is scored, "
                "else False or 0. Weights go to the loss, and labels of -100 are no mask."
            )
        if len(mask) != length or bool(mask[0]):
            raise ValueError(
                f"loss_mask {i} has {len(mask)} entries for {length} tokens, or scores the first "
                "token, which has nothing before it."
            )
    return masks


def scored_rows(batch: PackedBatch, scored: list[Tensor]) -> ScoredRows:
    """Rows to score, their owners, and which of them are real.

    Filler rows bring each sequence to a multiple of the fold's step, so that the LM head's gradient
    can be cut between any two sequences. They repeat the first row and have an ignored target.
    """
    index, real, owners = list[np.ndarray](), list[np.ndarray](), list[int]()
    for i, (start, mask) in enumerate(zip(batch.layout.query_starts, scored, strict=True)):
        rows = np.flatnonzero(mask.numpy()) + (start - 1)
        if len(rows):
            filler = -len(rows) % STEP
            index.append(np.concatenate([rows, np.full(filler, rows[0])]))
            real.append(np.arange(len(rows) + filler) < len(rows))
            owners += [i] * (len(rows) + filler)
    if not index:
        raise ValueError("no token is scored; the prompts or the loss mask leave none.")
    device, kept = batch.input_ids.device, np.concatenate(real)
    rows = from_host(np.concatenate(index), device)
    targets = batch.input_ids[rows + 1].masked_fill(from_host(~kept, device), IGNORED)
    return ScoredRows(rows, targets, from_host(np.flatnonzero(kept), device), owners)


def sampling_rows(
    sampling: Sampling | Sequence[Sampling] | None, sequences: int, rows: ScoredRows
) -> SamplingRows:
    """Sampling parameters of each row, from those of all sequences or of each; None: plain ones.

    ValueError where their number is another, TypeError for what are no sampling parameters.
    """
    device = rows.index.device
    if sampling is None:
        return SamplingRows.uniform(len(rows.owners), device=device)
    if not isinstance(sampling, Sequence):
        return _uniform_rows(sampling, len(rows.owners), device)
    if len(sampling) != sequences:
        raise ValueError(f"{len(sampling)} sampling parameters for {sequences} sequences.")
    per_sequence = SamplingRows.concatenate([_uniform_rows(s, 1, device) for s in sampling])
    return per_sequence.select(from_host(np.asarray(rows.owners), device))


def _uniform_rows(sampling: Sampling, count: int, device: torch.device) -> SamplingRows:
    return SamplingRows.uniform(count, **scored_under(sampling), device=device)


def scored_under(sampling: Sampling) -> dict[str, Any]:
    """The parameters of the distribution that a token's logprob is of, by name; none where it is
    that of the whole softmax. TypeError for what are no sampling parameters."""
    names = ("temperature", "top_k", "top_p", "min_p")
    if not all(hasattr(sampling, name) for name in names):
        raise TypeError(f"sampling: {type(sampling).__name__}; give SamplingParams for each.")
    is_whole = getattr(sampling, "greedy_logprobs", "zero") == "full"
    return {} if is_whole else {name: getattr(sampling, name) for name in names}


def scored_hidden_states(
    policy: nn.Module, batch: PackedBatch, scored: list[Tensor]
) -> tuple[Tensor, ScoredRows]:
    """Hidden states [M, H] of the rows that score tokens, and these rows; ValueError under
    gradients in fp16."""
    hidden = packed_hidden_states(policy, batch)
    if hidden.dtype == torch.float16 and hidden.requires_grad:
        raise ValueError(NO_FP16_TRAINING)
    rows = scored_rows(batch, scored)
    return hidden[rows.index], rows


def row_scores(
    policy: nn.Module, hidden: Tensor, rows: ScoredRows, parameters: SamplingRows
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N] of the scored tokens, from hidden states [M, H] of `rows`."""
    given = (hidden, lm_head_weight(policy), rows.targets, parameters)
    if is_canonical("token_logprobs"):
        buffer = lm_head_gradient(policy)
        found = token_logprobs(*given, weight_grad=buffer, check_targets=False)
    else:
        found = stock_scores(*given)
    logprobs, entropy = map(guarded_backward, found)
    return logprobs[rows.kept], entropy[rows.kept]
