"""Prefill through CUDA graphs: all ops of a call but attention, captured for a number of rows.

A step's chunks differ in number and lengths, so attention is launched for the chunks at hand,
between graphs of everything else. Launching a call op by op takes the host about a millisecond a
layer, so a small model or a short call would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import Attend, CapturedPagedAttention, PagedAttention
from rl_consistency.kernels.attention.op import attention_paged
from rl_consistency.models.graph_cache import (
    CAPTURED_AT,
    OPERATIONS_PER_SECOND,
    Captured,
    GraphPieces,
    borrowed,
    bucket_of,
)
from rl_consistency.rollout.block_manager import KVCache
from rl_consistency.rollout.device.calls import CallGraphs, Compute, RaggedCall, StaticCall
from rl_consistency.rollout.device.device_state import DeviceState, Fields
from rl_consistency.rollout.sampling_params import Truncation

HOST_SECONDS = 1.2e-3
"""What the host takes for a layer, op by op (30 to 56 ms for 28 of them on two hosts). Where the
GPU takes longer a graph gains nothing, and padding costs."""

AHEAD = (16, 64, 256, 512, 1024, 2048)
"""Numbers of rows that are captured when kernels are compiled, so that a prompt of a new length
finds a graph. Up to some hundred rows the time is that of reading the weights."""

MOST_CAPTURED = 96
"""Shapes that are captured at most: each holds as many graphs as the model has layers."""

SHARED_ROWS = 16384
"""Rows of the memory for attention's results that all calls share, where graphs reach so far."""


def sampled_bucket_of(sampled: int) -> int:
    """The number of sampled rows that a call is padded to: 16, 64, 256, 1,024, ...

    More of them cost time in the LM head and the sampler, which few steps are bound by.
    """
    return 16 << 2 * max(-(-((sampled - 1).bit_length() - 4) // 2), 0)


def buckets_up_to(most: int) -> list[int]:
    """The numbers of rows that calls of up to `most` rows are padded to."""
    found = [bucket_of(1)]
    while found[-1] < most:
        found.append(bucket_of(found[-1] + 1))
    return found


def most_rows(layer_parameters: int) -> int:
    """The most rows for which the host takes longer than the GPU, for layers of this size."""
    return int(HOST_SECONDS * OPERATIONS_PER_SECOND / (2 * max(layer_parameters, 1)))


@dataclass(frozen=True, kw_only=True)
class PaddedShape:
    """What a call is captured for."""

    rows: int
    sampled: int  # rows that are sampled from, padding included
    truncates: Truncation  # the most that a row asks for: no bit of the others


class PaddedCall(StaticCall):
    """A ragged call, padded to a shape."""

    def __init__(
        self,
        shape: PaddedShape,
        state: DeviceState,
        cache: KVCache,
        compute: Compute,
        attended: Callable[[Tensor], Tensor],
    ) -> None:
        """`attended` gives the memory [rows, H, D] of attention's results, for queries like these:
        zeros at first, finite always."""
        of_tokens = ("token_ids", "token_slots", "positions", "places")
        of_sampled = ("rows", "row_slots", "kept_in")
        fields: Fields = {
            **dict.fromkeys(of_tokens, (np.int64, (shape.rows,))),
            **dict.fromkeys(of_sampled, (np.int64, (shape.sampled,))),
            "used": (np.int32, (1,)),
        }
        super().__init__(shape, state, cache, compute, fields)
        self._attended, self._results = attended, None
        self._layout = partial(
            CapturedPagedAttention.interrupted,
            used=self.inputs["used"],
            slot_mapping=self.inputs["places"],
            **cache.tensors,
        )

    def stage(self, call: RaggedCall) -> Tensor:
        """A host buffer with the numbers of a call."""
        buffer, _ = self.filled({**call.arrays, "used": [len(call.arrays["token_ids"])]})
        return buffer

    def run(self, pieces: GraphPieces | None = None) -> None:
        self.run_with(self.results if pieces is None else partial(self.interrupt, pieces))

    def run_with(self, attend: Attend) -> None:
        """The same with another function in place of attention."""
        self._sample(self._layout(attend))

    def results(self, q: Tensor, *_: object) -> Tensor:
        """What stands for attention in a run on padding: its memory as it is."""
        if self._results is None:
            self._results = self._attended(q)
        return self._results

    def interrupt(
        self, pieces: GraphPieces, q: Tensor, k: Tensor, v: Tensor, *numbers: Any
    ) -> Tensor:
        """What stands for attention in a capture: `attention` is called in each replay."""
        operands = [borrowed(x) for x in (q, k, v)]
        pieces.interrupt(partial(self.attention, *operands, *numbers))
        return self.results(q)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        scale: float,
        window: int | None,
        paged: PagedAttention,
    ) -> Tensor:
        """The attention of the call's chunks, written where the next piece reads it."""
        out, scores = self.results(q), {"scale": scale, "window": window}
        return attention_paged(q, paged, layer, **scores, new=(k, v), out=out)[0]

    def clear(self, used: int) -> None:
        """Queue zeros into the attention results of the rows from `used` on."""
        if self._results is not None and used < self.shape.rows:
            self._results[used:].zero_()


class RaggedGraphs(CallGraphs[PaddedShape, PaddedCall]):
    """Captured padded calls by shape."""

    captured_at, most_captured = CAPTURED_AT, MOST_CAPTURED
    without_memory = (
        "no memory to capture a prefill of {rows} rows ({reason}); calls of so many run op by op, "
        "with the same bits and more work for the host. Lower max_batch_tokens or num_kv_blocks."
    )

    def __init__(self, *parts: Any, most: int) -> None:
        """`parts` are those of `CallGraphs`. `most`: the largest number of rows to capture."""
        super().__init__(*parts)
        self._most = most
        self._memory: Tensor | None = None
        self._lost: dict[PaddedShape, float] = {}  # to padding, in calls by the host

    def captured(self, call: RaggedCall, *, truncates: Truncation) -> Captured[PaddedCall] | None:
        """A captured call with room for this one; None where it should run op by op."""
        rows, sampled = len(call.arrays["token_ids"]), len(call.arrays["rows"])
        shape = self.shape_for(rows, sampled, truncates=truncates)
        if shape is None:
            return None
        wider = self._wider(shape)
        if wider is not None and wider != shape:
            lost = self._lost.get(shape, 0.0) + (wider.rows - shape.rows) / self._most
            self._lost[shape] = lost
            if lost < CAPTURED_AT - 1 or self._captured_now(shape) is None:
                shape = wider
        return self.get(shape, shape.rows)

    def drop(self) -> None:
        super().drop()
        self._lost.clear()

    def _captured_now(self, shape: PaddedShape) -> Captured[PaddedCall] | None:
        self._asked[shape] = self.captured_at
        return self.get(shape, shape.rows)

    def _wider(self, shape: PaddedShape) -> PaddedShape | None:
        """The smallest shape with room for this one that is captured, perhaps itself."""
        fits = (
            found
            for found in self._captured
            if found.rows >= shape.rows
            and found.sampled >= shape.sampled
            and found.truncates == shape.truncates
        )
        return min(fits, key=lambda found: (found.rows, found.sampled), default=None)

    @torch.no_grad()
    def capture_ahead(self, tokens: int, sampled: int, *, truncates: Truncation) -> None:
        """Capture some shapes for calls of up to so many tokens, of which so many are sampled."""
        smaller = next((rows for rows in AHEAD if rows >= tokens), AHEAD[-1])
        for rows in reversed(AHEAD[: AHEAD.index(smaller) + 1]):
            shape = self.shape_for(rows, min(sampled, rows), truncates=truncates)
            if shape is not None and shape not in self._captured:
                self._captured_now(shape)

    def shape_for(self, rows: int, sampled: int, *, truncates: Truncation) -> PaddedShape | None:
        """The shape for a call of so many rows; None where graphs gain nothing."""
        bucket = bucket_of(rows)
        if bucket > self._most or not self.has_room(bucket):
            return None
        # More than these are in no call, unless drafts are verified without graphs.
        room = min(sampled_bucket_of(sampled), self._state.dummy_slot, bucket)
        if sampled > room:
            return None
        return PaddedShape(rows=bucket, sampled=room, truncates=truncates)

    def _call(self, shape: PaddedShape) -> PaddedCall:
        return PaddedCall(shape, self._state, self._cache, self._compute, self._attended)

    def _attended(self, q: Tensor) -> Tensor:
        """Memory for attention's results, shared by all calls."""
        rows = q.shape[0]
        if self._memory is None or self._memory.shape[0] < rows:
            # Calls that were captured keep a smaller one.
            size = (max(rows, min(self._most, SHARED_ROWS)), *q.shape[1:])
            self._memory = torch.zeros(size, dtype=q.dtype, device=q.device)
        return self._memory[:rows]
