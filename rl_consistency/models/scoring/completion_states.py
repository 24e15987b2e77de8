"""Hidden states that say something of completion tokens: what a critic's head reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.scoring.scored_rows import packed, scored_rows, scored_tokens


class CompletionStates(NamedTuple):
    """Hidden states that a head reads, in rows that its gradient can be cut between."""

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
    batch, lens = packed(policy, sequences, attention_mask)
    scored = scored_tokens(sequences, lens, prompt_lengths, None, attention_mask)
    rows = scored_rows(batch, scored)
    hidden = packed_hidden_states(policy, batch)[rows.index]
    return CompletionStates(hidden, rows.kept, [int(mask.sum()) for mask in scored])
