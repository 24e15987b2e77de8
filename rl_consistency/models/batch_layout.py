"""The layouts a list of sequences can be handed to `token_logprobs` in; all give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl_consistency.models.packing import PackedBatch, from_host

Layout = Literal["packed", "packed_with_gaps", "left_padded", "right_padded"]

EXTRA_COLUMNS = 3  # beyond the longest sequence, so that every padded row has padding


def lay_out(
    sequences: Sequence[Sequence[int]], layout: Layout, device: torch.device | str = "cpu"
) -> tuple[PackedBatch | Tensor, Tensor | None]:
    """Sequences in one of the layouts, and the attention mask [B, L] where the layout is padded."""
    if layout in ("packed", "packed_with_gaps"):
        return PackedBatch.from_sequences(sequences, device, gap=int("gaps" in layout)), None
    width = max(len(sequence) for sequence in sequences) + EXTRA_COLUMNS
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        start = width - len(sequence) if layout == "left_padded" else 0
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    return from_host(ids, device), from_host(mask, device)
