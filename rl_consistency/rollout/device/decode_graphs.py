"""Decoding through CUDA graphs: one graph for each number of rows.

A graph holds a whole decode step: table updates, the model, sampling, and the token kept for the
next step. It reads one buffer, which the host fills for each step. Rows are padded to a bucket with
sequences of one token in the dummy slot; the bucket moves no bit of a row (claim C1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    SequenceTables,
    SharedRun,
    SharedTables,
    shared_arrays,
)
from rl_consistency.kernels.attention.schedules import reads_shared_keys_once
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.graph_cache import Captured, GraphCache
from rl_consistency.numerics.strict import current, is_canonical
from rl_consistency.rollout.block_manager import KVCache
from rl_consistency.rollout.device.device_state import DeviceState, StagedFields
from rl_consistency.rollout.device.shared_prefixes import most_runs
from rl_consistency.rollout.drafter import MAX_DRAFT
from rl_consistency.rollout.scheduler import ScheduledChunk

WIDTHS = (1, 4, 1 + MAX_DRAFT)
"""Tokens of a sequence in one call: the last known one and a draft, padded to one of these."""

_WIDTH_FOR_DRAFT = [WIDTHS[bisect_left(WIDTHS, 1 + draft)] for draft in range(WIDTHS[-1])]

BUCKETS, BUCKET_STEP = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256), 64
"""Numbers of rows up to which graphs are captured; above the last in steps of `BUCKET_STEP`."""

SHORTEST_STOCK_CONTEXT = 256  # keys that stock attention gathers at least; else a power of two


def buckets_up_to(most: int) -> tuple[int, ...]:
    """The numbers of rows that graphs are captured for, when at most `most` sequences run."""
    above = range(BUCKETS[-1] + BUCKET_STEP, most, BUCKET_STEP)
    return (*(rows for rows in (*BUCKETS, *above) if rows < most), most)


def width_for(draft: int) -> int:
    """The smallest width that holds a draft of so many tokens and the token before it."""
    return _WIDTH_FOR_DRAFT[draft]


Compute = Callable[..., tuple[Tensor, Tensor]]
"""The model and the sampler: (token_ids, positions, layout, slots, *, truncates) -> token ids [n]
and values [2 or 4, n] int32 of all rows of a call; see `SampledRows`."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one graph is captured for: `rows` sequences, padding included, of `width` tokens."""

    rows: int
    width: int
    truncates: bool
    """Whether the sampler restricts any row's support; it moves no bit of the others."""
    shared: bool
    """Whether sequences that share keys may have them read once; it moves no bit."""
    context: int  # most keys of a sequence: `context_bound`
    stock: frozenset[str]  # ops on their stock path


class DecodeCall:
    """One shape's decode step over buffers that never move; a graph captures `run`."""

    def __init__(self, shape: Shape, state: DeviceState, cache: KVCache, compute: Compute) -> None:
        self.shape = shape
        self._state = state
        self._compute = compute
        rows, tokens = shape.rows, shape.rows * shape.width
        self.most_new_blocks = -(-shape.width // cache.block_size)
        updates = rows * self.most_new_blocks
        runs = most_runs(rows) if shape.shared else 0
        self._dummy_place = state.dummy_block * cache.block_size
        of_tokens = ("token_slots", "token_ids", "positions", "places")
        self._fields = StagedFields(
            {
                "slots": (np.int64, (rows,)),
                **dict.fromkeys(of_tokens, (np.int64, (tokens,))),
                "cells": (np.int64, (updates,)),
                "blocks": (np.int32, (updates,)),
                "last_rows": (np.int64, (rows,)),
                "query_len": (np.int32, (rows,)),
                "token_len": (np.int32, (rows,)),
                "context_len": (np.int32, (rows,)),
                "shared_runs": (np.int32, (runs, 3)),
                "shared_keys": (np.int32, (rows if shape.shared else 0,)),
            }
        )
        device = state.device
        self._buffer = torch.zeros(self._fields.nbytes, dtype=torch.uint8, device=device)
        self._inputs = self._fields.tensors(self._buffer)
        self._values: Tensor | None = None
        width = state.block_tables.shape[1]
        self._layout = CapturedPagedAttention.of(
            SequenceTables(
                torch.arange(rows, dtype=torch.int32, device=device) * shape.width,
                self._inputs["query_len"],
                self._inputs["context_len"],
                torch.zeros(rows, width, dtype=torch.int32, device=device),
                self._shared_tables(),
                self._inputs["token_len"],
            ),
            queries=shape.width,
            capacity=shape.context,
            slot_mapping=self._inputs["places"],
            key_cache=cache.keys,
            value_cache=cache.values,
            block_size=cache.block_size,
        )

    def _shared_tables(self) -> SharedTables | None:
        if not self.shape.shared:
            return None
        return SharedTables(self._inputs["shared_runs"], self._inputs["shared_keys"])

    def stage(
        self,
        chunks: Sequence[ScheduledChunk],
        slots: NDArray[np.int64],
        runs: Sequence[SharedRun] = (),
    ) -> Tensor:
        """A host buffer with one step of n chunks in slots [n]; rows behind are padding.

        `runs` say which of the chunks' sequences share keys; only a `shared` shape has room.
        """
        state, count, width = self._state, len(chunks), self.shape.width
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lens = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        sequences = [chunk.sequence for chunk in chunks]
        ends = starts + lens
        cells, blocks = state.cover(sequences, slots, ends, most=self.most_new_blocks)
        buffer, arrays = self._fields.on_host(state.device)
        offsets = np.arange(width)
        # Positions behind a draft repeat its last: no table and no cosine lies beyond.
        positions = np.minimum(starts[:, None] + offsets, ends[:, None] - 1)
        places = state.places(slots[:, None], positions)
        places[offsets >= lens[:, None]] = self._dummy_place
        if self.shape.shared:
            most = len(arrays["shared_runs"])
            arrays["shared_runs"][...], arrays["shared_keys"][...] = shared_arrays(
                runs, most, self.shape.rows
            )
        for name, real, padding in (
            ("slots", slots, state.dummy_slot),
            ("token_slots", slots.repeat(width), state.dummy_slot),
            ("token_ids", self._token_ids(chunks).ravel(), 0),
            ("positions", positions.ravel(), 0),
            ("places", places.ravel(), self._dummy_place),
            ("cells", cells, state.dummy_slot * state.block_tables.shape[1]),
            ("blocks", blocks, state.dummy_block),
            ("last_rows", np.arange(count) * width + lens - 1, 0),
            ("query_len", lens, 1),
            ("token_len", lens, 0),
            ("context_len", ends, 1),
        ):
            arrays[name][: len(real)] = real
            arrays[name][len(real) :] = padding
        return buffer

    def _token_ids(self, chunks: Sequence[ScheduledChunk]) -> NDArray[np.int64]:
        """[n, width]: the tokens the host knows, -1 for the one that only the device does."""
        known = [
            ids[chunk.start] if chunk.start < len(ids := chunk.sequence.token_ids) else -1
            for chunk in chunks
        ]
        token_ids = np.zeros((len(chunks), self.shape.width), dtype=np.int64)
        token_ids[:, 0] = known
        if self.shape.width > 1:
            for row, chunk in zip(token_ids, chunks, strict=True):
                row[1 : 1 + len(chunk.draft)] = chunk.draft
        return token_ids

    def load(self, staged: Tensor) -> None:
        """Queue the copy of a staged step into the buffer that `run` reads."""
        self._buffer.copy_(staged, non_blocking=True)

    def run(self) -> None:
        """Compute the step that was loaded; leaves what it sampled in `values`."""
        state, inputs, numbers = self._state, self._inputs, self._layout.numbers
        state.block_tables.view(-1).index_copy_(0, inputs["cells"], inputs["blocks"])
        torch.index_select(state.block_tables, 0, inputs["slots"], out=numbers.block_table)
        token_ids = state.resolve(inputs["token_ids"], inputs["token_slots"])
        tokens, values = self._compute(
            token_ids,
            inputs["positions"],
            self._layout,
            inputs["token_slots"],
            truncates=self.shape.truncates,
        )
        # Behind a draft this may not be the last token; but there the host knows which one is.
        last = tokens.index_select(0, inputs["last_rows"])
        state.last_tokens.index_copy_(0, inputs["slots"], last)
        if self._values is None:  # in the first run, which comes before a capture
            self._values = torch.empty_like(values)
        self._values.copy_(values)

    @property
    def values(self) -> Tensor:
        """What the last run sampled, [2 or 4, rows] int32."""
        assert self._values is not None, "the call was not run"
        return self._values


class DecodeGraphs(GraphCache[Shape, Captured[DecodeCall]]):
    """Captured decode calls by shape, made on first use.

    No sequence has more than `capacity` tokens. `prepare` makes what must not be made during a
    capture, and returns what the graphs read and the model may replace.
    """

    def __init__(
        self,
        state: DeviceState,
        cache: KVCache,
        compute: Compute,
        *,
        capacity: int,
        prepare: Callable[[], object],
    ) -> None:
        super().__init__()
        self._state, self._cache, self._compute = state, cache, compute
        self._capacity, self._prepare = capacity, prepare
        self._reads_once = reads_shared_keys_once(cache.keys[0])
        self._buckets = buckets_up_to(state.dummy_slot)

    @property
    def share_keys(self) -> bool:
        """Whether attention reads keys once that sequences share."""
        return self._reads_once and is_canonical("attention")

    def shape_for(
        self, rows: int, width: int, *, truncates: bool, longest: int, shared: bool = False
    ) -> Shape:
        """The smallest shape for `rows` sequences of at most `longest` keys."""
        return Shape(
            rows=self._buckets[bisect_left(self._buckets, rows)],
            width=width,
            truncates=truncates,
            shared=shared,
            context=context_bound(longest, self._capacity),
            stock=current().stock,
        )

    def captured(self, shape: Shape) -> Captured[DecodeCall]:
        """The call for a shape, captured at first.

        A call for sequences that share keys serves others too, where it alone is captured.
        """
        wider = replace(shape, shared=True)
        if shape not in self._captured and wider in self._captured:
            shape = wider
        found = self.get(shape, shape.rows)
        assert found is not None
        return found

    def run_padding(self, shape: Shape) -> None:
        """Run the call that `captured` would capture once, as it is, on padding alone."""
        with certified_to_the_row():
            self._call(shape).run()

    def _call(self, shape: Shape) -> DecodeCall:
        """The call, loaded with padding alone: running it touches no sequence."""
        call = DecodeCall(shape, self._state, self._cache, self._compute)
        call.load(call.stage((), np.zeros(0, dtype=np.int64)))
        return call

    def _capture(self, shape: Shape) -> Captured[DecodeCall]:
        kept = self._prepare()
        call = self._call(shape)
        pieces = self.in_place(self._state.device).captured(lambda _: call.run())
        return Captured(call, pieces.replay, kept)


def context_bound(longest: int, capacity: int) -> int:
    """Most keys that a captured call is made for when its longest sequence has `longest`."""
    if is_canonical("attention"):
        return capacity
    bucket = max(SHORTEST_STOCK_CONTEXT, 1 << (longest - 1).bit_length())
    return min(bucket, capacity)
