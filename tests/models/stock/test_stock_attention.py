"""Stock attention over a captured layout reads a sequence's own keys and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_consistency.kernels.attention.captured_layout import CapturedPagedAttention
from rl_consistency.kernels.attention.layout import SequenceTables
from rl_consistency.models.stock import stock_captured_attention

BLOCK_SIZE, NUM_BLOCKS = 4, 6
TABLES = [[1, 0, 0], [3, 5, 0], [2, 4, 4]]
CONTEXTS = [2, 5, 12]


def attended(keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """One query of each of three sequences, [3, 2, 16]."""
    numbers = SequenceTables(
        torch.arange(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
        torch.tensor(CONTEXTS, dtype=torch.int32),
        torch.tensor(TABLES, dtype=torch.int32),
    )
    layout = CapturedPagedAttention.of(
        numbers,
        queries=1,
        capacity=12,
        slot_mapping=torch.arange(3),
        key_cache=[keys],
        value_cache=[values],
        block_size=BLOCK_SIZE,
    )
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(2))
    return stock_captured_attention(q, layout, 0, scale=0.25, window=window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("stale", [math.nan, math.inf])
def test_what_a_block_held_before_is_not_seen(stale: float, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 1, 16, generator=generator)
    expected = attended(keys, values, window)
    own = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for table, context in zip(TABLES, CONTEXTS, strict=True):
        for position in range(context):
            own[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    assert not own.all()
    for cache in (keys, values):
        cache[~own] = stale
    assert attended(keys, values, window).equal(expected)
    keys[1, 0] = stale  # negative control: a key of the first sequence
    assert not attended(keys, values, None)[0].equal(expected[0])
