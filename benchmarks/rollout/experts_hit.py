"""How many experts decode steps read: measured on the sequences that were decoded.

A step reads the weights of an expert once if any of its tokens is routed there, and not at all if
none is. Which experts decoding met is found afterwards, by a training forward over the same
sequences: it has the bits of decoding, so the same experts. Steps are lined up by the position of
their tokens; in the engine a sequence may be a few tokens ahead of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_consistency.models.families import num_experts
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PackedBatch
from rl_consistency.numerics.settings import numeric_settings

CHUNK_TOKENS, SAMPLED_STEPS = 16384, 8
"""Tokens of a forward pass, and steps that are counted, at even distances."""


def experts_hit(model: Any, sequences: Sequence[Sequence[int]], new_tokens: int) -> list[float]:
    """The distinct experts that a decode step meets in each sparse layer: the mean of some steps.

    `sequences` are all as long and end with `new_tokens` that were decoded together.
    """
    length = len(sequences[0])
    fed = new_tokens - 1  # the last token is fed to no step
    steps = sorted({fed * i // SAMPLED_STEPS for i in range(SAMPLED_STEPS)})
    positions = torch.tensor([length - new_tokens + step for step in steps])
    together = max(CHUNK_TOKENS // length, 1)
    met: list[torch.Tensor] = []  # of each chunk [layers, sequences, steps, k]
    for first in range(0, len(sequences), together):
        chunk = sequences[first : first + together]
        batch = PackedBatch.from_sequences(chunk, model.device)
        rows = batch.token_rows.view(len(chunk), length)[:, positions.to(model.device)]
        with torch.no_grad(), numeric_settings(), recorded_routing() as record:
            packed_hidden_states(model, batch)
        met.append(torch.stack([layer.expert_ids[rows] for layer in record.layers]))
    ids = torch.cat(met, dim=1).transpose(1, 2).flatten(2)  # [layers, steps, sequences * k]
    in_order = ids.sort(dim=-1).values
    distinct = 1 + (in_order.diff(dim=-1) != 0).sum(dim=-1)
    return distinct.double().mean(dim=1).tolist()


def evenly_hit(config: Any, num_sequences: int) -> float:
    """The distinct experts that a decode step would meet in one layer, if routing were even and
    tokens independent of each other."""
    experts = num_experts(config)
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** num_sequences)
