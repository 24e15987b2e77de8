"""One call of the model over chunks of any lengths: prefill, and decoding without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_consistency.rollout.device.device_state import DeviceState
from rl_consistency.rollout.scheduler import ScheduledChunk


@dataclass(frozen=True, kw_only=True)
class RaggedShape:
    """A call of sequences that are all alike."""

    sequences: int = 1
    queries: int
    """New tokens of each sequence."""
    past: int = 0
    """Tokens of each sequence whose keys lie in the cache."""
    sampled: int = 1
    """Rows that are sampled from."""


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """The numbers of a call, on the host.

    Example: 4 prompt tokens of the sequence in slot 2, the last of which samples, and the pending
    token of the one in slot 0, which has 7 tokens computed:

        token_ids = [5, 6, 7, 8, -1]    token_slots = [2, 2, 2, 2, 0]    positions = [0, 1, 2, 3, 7]
        rows = [3, 4]                   row_slots = [2, 0]               kept_in = [2, 0]
    """

    arrays: dict[str, NDArray[Any]]
    """int64. Of each token: `token_ids` (-1: the one sampled last), `token_slots`, `positions`,
    `places` in the cache. Of each row that is sampled from: `rows` (which token), `row_slots`,
    `kept_in` (the slot whose last token it becomes)."""
    starts: list[int]
    lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    counts: NDArray[np.int64]  # rows of each chunk that samples

    @classmethod
    def of(
        cls, chunks: Sequence[ScheduledChunk], state: DeviceState, block_size: int
    ) -> RaggedCall:
        """The call for chunks of admitted sequences; enters their new blocks in `state`."""
        slots = np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lens = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        contexts = starts + lens
        state.cover([chunk.sequence for chunk in chunks], slots, contexts)
        ends = np.cumsum(lens)
        token_slots = np.repeat(slots, lens)
        positions = np.arange(len(token_slots)) + np.repeat(contexts - ends, lens)
        sampled = [i for i, chunk in enumerate(chunks) if chunk.samples]
        counts = np.array([1 + len(chunks[i].draft) for i in sampled], dtype=np.int64)
        into_call = ends[sampled] - np.cumsum(counts)
        # After a draft the host knows the last token. The device's goes to the dummy slot, unread.
        kept_in = np.where(counts == 1, slots[sampled], state.dummy_slot)
        return cls(
            arrays={
                "token_ids": np.array([t for c in chunks for t in _token_ids(c)], dtype=np.int64),
                "token_slots": token_slots,
                "positions": positions,
                "places": state.places(token_slots, positions),
                "rows": np.arange(counts.sum()) + np.repeat(into_call, counts),
                "row_slots": np.repeat(slots[sampled], counts),
                "kept_in": np.repeat(kept_in, counts),
            },
            starts=(ends - lens).tolist(),
            lens=lens.tolist(),
            context_lens=contexts.tolist(),
            block_tables=[
                chunk.sequence.block_table[: -(-chunk.end // block_size)] for chunk in chunks
            ],
            counts=counts,
        )

    @classmethod
    def padding(cls, shape: RaggedShape, state: DeviceState, block_size: int) -> RaggedCall:
        """A call in the dummy slot and block, which touches no sequence."""
        count, queries = shape.sequences, shape.queries
        tokens, end = count * queries, shape.past + queries
        # The last rows are sampled from, over and over where there are fewer than that.
        rows = np.arange(tokens - shape.sampled, tokens) % tokens
        dummy = [state.dummy_slot]
        return cls(
            arrays={
                "token_ids": np.zeros(tokens, dtype=np.int64),
                "token_slots": np.repeat(dummy, tokens),
                "positions": np.tile(np.arange(shape.past, end), count),
                "places": np.repeat([state.dummy_block * block_size], tokens),
                "rows": rows,
                "row_slots": np.repeat(dummy, shape.sampled),
                "kept_in": np.repeat(dummy, shape.sampled),
            },
            starts=list(range(0, tokens, queries)),
            lens=[queries] * count,
            context_lens=[end] * count,
            block_tables=[[state.dummy_block] * -(-end // block_size)] * count,
            counts=np.ones(shape.sampled, dtype=np.int64),
        )


def _token_ids(chunk: ScheduledChunk) -> list[int]:
    """The chunk's tokens, -1 for the one that only the device knows."""
    known = chunk.sequence.token_ids[chunk.start : chunk.end]
    pending = chunk.length - len(known) - len(chunk.draft)
    return [*known, *([-1] * pending), *chunk.draft]
