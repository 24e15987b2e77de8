"""Scoring sequences that begin alike: what they share is computed once, without gradients.

Order: that of every op. The row of a token depends on the tokens before it and on nothing else, so
the bits are those of sequences that are computed whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.models.forward import cache_sizes, check_forward, paged_hidden_states
from rl_consistency.models.packing import ROW_ALIGNMENT, PackedBatch, from_host


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """Sequences cut into parts: beginnings that several of them share, then the rest of each.

    Example, with blocks of 16: two samples of one prompt of 40 tokens are three parts, 32 tokens
    of the prompt and what follows them in each sample.
    """

    parts: list[Sequence[int]]
    before: list[int | None]
    """For each part, the part that stands before it; None for the first of a sequence."""
    own: list[int]
    """For each sequence, the part that is its rest."""

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> SharedPrompts | None:
        """The cut, at whole blocks of each prompt; None where no two begin alike."""
        cuts = [
            min(prompt, len(tokens) - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
            for tokens, prompt in zip(sequences, prompt_lengths, strict=True)
        ]
        beginnings = [tuple(tokens[:cut]) for tokens, cut in zip(sequences, cuts, strict=True)]
        shared = [beginning for beginning, n in Counter(beginnings).items() if beginning and n > 1]
        if not shared:
            return None
        index = {beginning: i for i, beginning in enumerate(shared)}
        of_each = [index.get(beginning) for beginning in beginnings]
        rests = [
            tokens if before is None else tokens[cut:]
            for tokens, before, cut in zip(sequences, of_each, cuts, strict=True)
        ]
        own = list(range(len(shared), len(shared) + len(rests)))
        return cls([*shared, *rests], [*([None] * len(shared)), *of_each], own)

    @property
    def pasts(self) -> list[int]:
        """Tokens before each part."""
        return [0 if i is None else len(self.parts[i]) for i in self.before]

    def rows_of(self, starts: Sequence[int], sequence: int) -> np.ndarray:
        """Row of each token of a sequence, where the parts' rows begin at `starts`."""
        own = self.own[sequence]
        parts = [part for part in (self.before[own], own) if part is not None]
        return np.concatenate([np.arange(len(self.parts[i])) + starts[i] for i in parts])


@torch.no_grad()
def shared_hidden_states(
    model: Any, shared: SharedPrompts, whole: PackedBatch
) -> tuple[Tensor, Tensor]:
    """(hidden states of the parts' rows, which of them each row of the `whole` sequences has).

    The keys and values of one layer at a time lie in a cache of R rows: each part starts on a block
    of it, so the blocks of a sequence are those of its parts.
    """
    batch = PackedBatch.from_sequences(shared.parts, model.device)
    check_forward(model, batch)
    starts, lens, pasts = batch.layout.query_starts, batch.layout.query_lens, shared.pasts
    rows = len(batch.input_ids)
    blocks = [
        list(range(start // ROW_ALIGNMENT, -(-(start + n) // ROW_ALIGNMENT)))
        for start, n in zip(starts, lens, strict=True)
    ]
    spans = np.zeros(rows, dtype=np.int64)
    for start, n, past in zip(starts, lens, pasts, strict=True):
        spans[start : start + n] = past
    layers, *of_a_token = cache_sizes(model)
    # Every slot is written in every layer before it is read, those of filler rows too.
    cache = torch.empty(
        2, rows // ROW_ALIGNMENT, ROW_ALIGNMENT, *of_a_token, dtype=model.dtype, device=model.device
    )
    paged = PagedAttention(
        query_starts=starts,
        query_lens=lens,
        context_lens=[past + n for past, n in zip(pasts, lens, strict=True)],
        block_tables=[
            own if i is None else [*blocks[i], *own]
            for i, own in zip(shared.before, blocks, strict=True)
        ],
        slot_mapping=torch.arange(rows, device=model.device),
        key_cache=[cache[0]] * layers,
        value_cache=[cache[1]] * layers,
        block_size=ROW_ALIGNMENT,
    )
    positions = batch.position_ids + from_host(spans, model.device)
    hidden = paged_hidden_states(model, batch.input_ids, positions, paged)
    places = np.zeros(len(whole.input_ids), dtype=np.int64)  # filler has any row
    spans_of = zip(whole.layout.query_starts, whole.layout.query_lens, strict=True)
    for i, (start, n) in enumerate(spans_of):
        places[start : start + n] = shared.rows_of(starts, i)
    return hidden, from_host(places, model.device)
