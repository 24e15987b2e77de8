"""The numbers of a call on the host, and calls over buffers that never move on the device.

Decoding and prefill run through CUDA graphs of the latter: they read one buffer, which the host
fills for each step, and are padded to a shape. Padding stands in the dummy slot and block, and
moves no bit of a row (claim C1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.graph_cache import Captured, GraphCache, GraphPieces, Shape
from rl_consistency.rollout.block_manager import KVCache
from rl_consistency.rollout.device.device_state import DeviceState, Fields, StagedFields
from rl_consistency.rollout.sampling_params import Truncation
from rl_consistency.rollout.scheduler import ScheduledChunk


@dataclass(frozen=True, kw_only=True)
class RaggedShape:
    """A call of sequences that are all alike."""

    sequences: int = 1
    queries: int  # new tokens of each sequence
    past: int = 0  # tokens of each sequence whose keys lie in the cache
    sampled: int = 1  # rows that are sampled from


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """The numbers of a call of sequences with any number of new tokens each, on the host.

    Example: 4 prompt tokens of the sequence in slot 2, the last of which samples, and the pending
    token of the one in slot 0, which has 7 tokens computed:

        token_ids = [5, 6, 7, 8, -1]    token_slots = [2, 2, 2, 2, 0]    positions = [0, 1, 2, 3, 7]
        rows = [3, 4]                   row_slots = [2, 0]               kept_in = [2, 0]
    """

    arrays: dict[str, NDArray[Any]]
    """int64. Of each token: `token_ids` (-1: the one sampled last), `token_slots`, `positions`,
    `places` in the cache. Of each row that is sampled from: `rows` (which token), `row_slots`,
    `kept_in` (the slot whose last token it becomes)."""
    lens: NDArray[np.int64]
    """New tokens of each sequence; `contexts`: with those before them; `tables`: their blocks."""
    contexts: NDArray[np.int64]
    tables: list[list[int]]
    counts: NDArray[np.int64]  # rows of each chunk that samples

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk], state: DeviceState) -> RaggedCall:
        """The call for chunks of admitted sequences; enters their new blocks in `state`."""
        sequences = [chunk.sequence for chunk in chunks]
        slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        lens = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        contexts = np.array([chunk.end for chunk in chunks], dtype=np.int64)
        state.cover(sequences, slots, contexts)
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
            lens=lens,
            contexts=contexts,
            tables=[sequence.block_table for sequence in sequences],
            counts=counts,
        )

    @classmethod
    def padding(cls, shape: RaggedShape, state: DeviceState, block_size: int) -> RaggedCall:
        """A call in the dummy slot and block, which touches no sequence."""
        count, queries = shape.sequences, shape.queries
        tokens, end = count * queries, shape.past + queries
        slots = np.full(shape.sampled, state.dummy_slot)
        return cls(
            arrays={
                "token_ids": np.zeros(tokens, dtype=np.int64),
                "token_slots": np.full(tokens, state.dummy_slot),
                "positions": np.tile(np.arange(shape.past, end), count),
                "places": np.full(tokens, state.dummy_block * block_size),
                # The last rows, over and over where there are fewer than that.
                "rows": np.arange(tokens - shape.sampled, tokens) % tokens,
                "row_slots": slots,
                "kept_in": slots,
            },
            lens=np.full(count, queries),
            contexts=np.full(count, end),
            tables=[[state.dummy_block] * -(-end // block_size)] * count,
            counts=np.ones(shape.sampled, dtype=np.int64),
        )

    def paged(self, cache: KVCache, places: Tensor) -> PagedAttention:
        """The layout of the call; `places` are those of `arrays`, on the device."""
        return PagedAttention(
            query_starts=(np.cumsum(self.lens) - self.lens).tolist(),
            query_lens=self.lens.tolist(),
            context_lens=self.contexts.tolist(),
            block_tables=self.tables,
            slot_mapping=places,
            **cache.tensors,
        )


def _token_ids(chunk: ScheduledChunk) -> list[int]:
    """The chunk's tokens, -1 for the one that only the device knows."""
    known = chunk.sequence.token_ids[chunk.start : chunk.end]
    pending = chunk.length - len(known) - len(chunk.draft)
    return [*known, *([-1] * pending), *chunk.draft]


Compute = Callable[[Mapping[str, Tensor], PagedAttention, Truncation], Tensor]
"""`ModelRunner._compute`: (inputs, layout, truncates) -> what the call sampled."""


class StaticCall:
    """A call over buffers that never move, loaded with padding alone at first: running it then
    touches no sequence. A subclass computes in `run`."""

    def __init__(
        self, shape: Any, state: DeviceState, cache: KVCache, compute: Compute, fields: Fields
    ) -> None:
        self.shape, self._state, self._compute = shape, state, compute
        self._fields = StagedFields(fields)
        self._buffer = torch.zeros(self._fields.nbytes, dtype=torch.uint8, device=state.device)
        self.inputs = self._fields.tensors(self._buffer)
        self._values: Tensor | None = None
        slot, block = state.dummy_slot, state.dummy_block
        self._padding = {
            **dict.fromkeys(("slots", "token_slots", "row_slots", "kept_in"), slot),
            **{"places": block * cache.block_size, "query_len": 1, "context_len": 1},
        }
        self.load(self.filled({})[0])

    def filled(self, numbers: Mapping[str, Any]) -> tuple[Tensor, dict[str, NDArray[Any]]]:
        """A host buffer with the numbers of a step and padding behind them, and its arrays."""
        buffer, arrays = self._fields.on_host(self._state.device)
        for name, array in arrays.items():
            real = numbers.get(name, array[:0])
            array[: len(real)] = real
            array[len(real) :] = self._padding.get(name, 0)
        return buffer, arrays

    def load(self, staged: Tensor) -> None:
        """Queue the copy of a host buffer into the one that `run` reads."""
        self._buffer.copy_(staged, non_blocking=True)

    def run(self, pieces: GraphPieces | None = None) -> None:
        """Compute the step that was loaded, in a capture if there are `pieces`."""
        raise NotImplementedError

    def _sample(self, layout: PagedAttention) -> None:
        """Run the model and the sampler; leaves what they sampled in `values`."""
        values = self._compute(self.inputs, layout, self.shape.truncates)
        if self._values is None:  # in the first run, which comes before a capture
            self._values = torch.empty_like(values)
        self._values.copy_(values)

    @property
    def values(self) -> Tensor:
        """What the last run sampled, [2 or 3, rows] int64."""
        assert self._values is not None, "the call was not run"
        return self._values


Call = TypeVar("Call", bound=StaticCall)


class CallGraphs(GraphCache[Shape, Captured[Call]]):
    """Captured calls by shape. `prepare` makes what must not be made during a capture, and returns
    what the graphs read and the model may replace."""

    def __init__(
        self, state: DeviceState, cache: KVCache, compute: Compute, prepare: Callable[[], object]
    ) -> None:
        super().__init__()
        self._state, self._cache, self._compute, self._prepare = state, cache, compute, prepare

    def _call(self, shape: Shape) -> Call:
        raise NotImplementedError

    def run_padding(self, shape: Shape) -> None:
        """Run the call that would be captured once, as it is, on padding alone."""
        call = self._call(shape)
        with certified_to_the_row():
            call.run()

    def _capture(self, shape: Shape, *_: Any) -> Captured[Call]:
        kept = self._prepare()
        call = self._call(shape)
        return Captured(call, self.in_place(self._state.device).captured(call.run).replay, kept)
