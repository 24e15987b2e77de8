"""Decoding through CUDA graphs: one graph for each number of rows.

A graph holds a whole decode step: the model, sampling, and the token kept for the next step. Rows
are padded to a bucket with sequences of one token in the dummy slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    CapturedPagedAttention,
    SequenceTables,
    SharedRun,
    SharedTables,
    shared_arrays,
)
from rl_consistency.kernels.attention.schedules import reads_shared_keys_once
from rl_consistency.models.graph_cache import Captured, GraphPieces
from rl_consistency.numerics.strict import current, is_canonical
from rl_consistency.rollout.block_manager import KVCache
from rl_consistency.rollout.device.calls import CallGraphs, Compute, RaggedCall, StaticCall
from rl_consistency.rollout.device.device_state import DeviceState, Fields
from rl_consistency.rollout.device.shared_prefixes import most_runs
from rl_consistency.rollout.drafter import MAX_DRAFT
from rl_consistency.rollout.sampling_params import Truncation

WIDTHS = (1, 4, 1 + MAX_DRAFT)
"""Tokens of a sequence in one call: the last known one and a draft, padded to one of these."""

BUCKETS, BUCKET_STEP = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256), 64
"""Numbers of rows up to which graphs are captured; above the last in steps of `BUCKET_STEP`."""

OF_TOKENS = ("token_slots", "token_ids", "positions", "places", "kept_in")

SHORTEST_STOCK_CONTEXT = 256  # keys that stock attention gathers at least; else a power of two


def buckets_up_to(most: int) -> tuple[int, ...]:
    """The numbers of rows that graphs are captured for, when at most `most` sequences run."""
    above = range(BUCKETS[-1] + BUCKET_STEP, most, BUCKET_STEP)
    return (*(rows for rows in (*BUCKETS, *above) if rows < most), most)


def width_for(draft: int) -> int:
    """The smallest width that holds a draft of so many tokens and the token before it."""
    return WIDTHS[bisect_left(WIDTHS, 1 + draft)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one graph is captured for: `rows` sequences, padding included, of `width` tokens."""

    rows: int
    width: int
    truncates: Truncation  # the most that a row asks for: no bit of the others
    shared: bool  # whether sequences that share keys may have them read once: no bit
    context: int  # most keys of a sequence: `context_bound`
    stock: frozenset[str]  # ops on their stock path


class DecodeCall(StaticCall):
    """One shape's decode step."""

    def __init__(self, shape: Shape, state: DeviceState, cache: KVCache, compute: Compute) -> None:
        rows, tokens = shape.rows, shape.rows * shape.width
        of_rows = ("query_len", "token_len", "context_len")
        fields: Fields = {
            "slots": (np.int64, (rows,)),
            **dict.fromkeys(OF_TOKENS, (np.int64, (tokens,))),
            **dict.fromkeys(of_rows, (np.int32, (rows,))),
        }
        if shape.shared:
            fields["shared_runs"] = (np.int32, (most_runs(rows), 3))
            fields["shared_keys"] = (np.int32, (rows,))
        super().__init__(shape, state, cache, compute, fields)
        inputs, int32 = self.inputs, {"dtype": torch.int32, "device": state.device}
        inputs["row_slots"] = inputs["token_slots"]  # all rows are sampled from
        shared = None
        if shape.shared:
            shared = SharedTables(inputs["shared_runs"], inputs["shared_keys"])
        self._layout = CapturedPagedAttention.of(
            SequenceTables(
                torch.arange(rows, **int32) * shape.width,
                inputs["query_len"],
                inputs["context_len"],
                torch.zeros(rows, state.block_tables.shape[1], **int32),
                shared,
                inputs["token_len"],
            ),
            queries=shape.width,
            capacity=shape.context,
            slot_mapping=inputs["places"],
            **cache.tensors,
        )

    def stage(self, call: RaggedCall, runs: Sequence[SharedRun] = ()) -> Tensor:
        """A host buffer with the numbers of a call of decode chunks, a draft of each at most.

        `runs` say which of its sequences share keys; only a `shared` shape has room.
        """
        lens, rows = call.lens, self.shape.rows
        numbers: dict[str, Any] = {
            "slots": call.arrays["token_slots"][np.cumsum(lens) - 1],
            "query_len": lens,
            "token_len": lens,
            "context_len": call.contexts,
        }
        if self.shape.shared:
            arrays = shared_arrays(runs, most_runs(rows), rows)
            numbers["shared_runs"], numbers["shared_keys"] = arrays
        buffer, arrays = self.filled(numbers)
        firsts = np.arange(len(lens)) * self.shape.width - (np.cumsum(lens) - lens)
        into = np.arange(lens.sum()) + np.repeat(firsts, lens)
        for name in OF_TOKENS:
            arrays[name][into] = call.arrays[name]
        return buffer

    def run(self, pieces: GraphPieces | None = None) -> None:
        table = self._layout.numbers.block_table
        torch.index_select(self._state.block_tables, 0, self.inputs["slots"], out=table)
        self._sample(self._layout)


class DecodeGraphs(CallGraphs[Shape, DecodeCall]):
    """Captured decode calls by shape, made on first use."""

    def __init__(self, *parts: Any, capacity: int) -> None:
        """`parts` are those of `CallGraphs`. No sequence has more than `capacity` tokens."""
        super().__init__(*parts)
        self._capacity = capacity
        self._reads_once = reads_shared_keys_once(self._cache.keys[0])
        self._buckets = buckets_up_to(self._state.dummy_slot)

    @property
    def share_keys(self) -> bool:
        """Whether attention reads keys once that sequences share."""
        return self._reads_once and is_canonical("attention")

    def shape_for(
        self, rows: int, width: int, *, truncates: Truncation, longest: int, shared: bool = False
    ) -> Shape:
        """The smallest shape for `rows` sequences of at most `longest` keys."""
        return Shape(
            rows=self._buckets[bisect_left(self._buckets, rows)],
            width=width,
            truncates=truncates,
            shared=shared and rows > 1,
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

    def _call(self, shape: Shape) -> DecodeCall:
        return DecodeCall(shape, self._state, self._cache, self._compute)


def context_bound(longest: int, capacity: int) -> int:
    """Most keys that a captured call is made for when its longest sequence has `longest`."""
    if is_canonical("attention"):
        return capacity
    bucket = max(SHORTEST_STOCK_CONTEXT, 1 << (longest - 1).bit_length())
    return min(bucket, capacity)
