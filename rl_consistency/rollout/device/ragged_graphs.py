"""Prefill through CUDA graphs: all ops of a call but attention, captured for a number of rows.

A step's chunks differ in number and lengths, so attention is launched for the chunks at hand,
between graphs of everything else. Rows are padded to a bucket with tokens in the dummy slot; the
bucket moves no bit of a row (claim C1). Launching a call op by op takes the host about a
millisecond a layer, so a small model or a short call would wait for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import Attend, CapturedPagedAttention, PagedAttention
from rl_consistency.kernels.attention.op import attention_paged
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.captured.buckets import OPERATIONS_PER_SECOND, bucket_of
from rl_consistency.models.captured.graph_pieces import GraphPieces, borrowed, is_out_of_memory
from rl_consistency.rollout.device.device_state import DeviceState
from rl_consistency.rollout.device.kv_cache import KVCache
from rl_consistency.rollout.device.ragged_call import RaggedCall
from rl_consistency.rollout.device.staging import StagedFields

HOST_SECONDS = 1.2e-3
"""What the host takes for a layer, op by op (30 to 56 ms for 28 of them on two hosts). Where the
GPU takes longer a graph gains nothing, and padding costs."""

CAPTURED_AT = 4
"""The call of a shape that captures it: capturing takes as long as three calls op by op, so at
worst the calls before it and the capture take twice what was needed."""

MOST_CAPTURED = 96
"""Shapes that are captured at most: each holds as many graphs as the model has layers."""

SHARED_ROWS = 16384
"""Rows of the memory for attention's results that all calls share, where graphs reach so far."""

Compute = Callable[..., tuple[Tensor, Tensor]]
"""The model and the sampler: (token_ids, positions, layout, rows, slots, *, truncates) -> token ids
[n] and values [2 or 4, n] int32 of `rows` [n]; see `SampledRows`."""


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
    sampled: int
    """Rows that are sampled from, padding included."""
    truncates: bool
    """Whether the sampler restricts any row's support; it moves no bit of the others."""


class PaddedCall:
    """A ragged call over buffers that never move, padded to a shape."""

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
        self.shape = shape
        self._state, self._compute, self._attended = state, compute, attended
        of_tokens = ("token_ids", "token_slots", "positions", "places")
        of_sampled = ("rows", "row_slots", "kept_in")
        self._fields = StagedFields(
            {name: (np.int64, (shape.rows,)) for name in of_tokens}
            | {name: (np.int64, (shape.sampled,)) for name in of_sampled}
            | {"used": (np.int32, (1,))}
        )
        self._buffer = torch.zeros(self._fields.nbytes, dtype=torch.uint8, device=state.device)
        self._inputs = self._fields.tensors(self._buffer)
        self._padding = {
            "token_slots": state.dummy_slot,
            "places": state.dummy_block * cache.block_size,
            "row_slots": state.dummy_slot,
            "kept_in": state.dummy_slot,
        }
        self._layout = partial(
            CapturedPagedAttention.interrupted,
            used=self._inputs["used"],
            slot_mapping=self.places,
            key_cache=cache.keys,
            value_cache=cache.values,
            block_size=cache.block_size,
        )
        self._values: Tensor | None = None
        self._results: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """[rows] int64, where in the cache each token's keys and values go."""
        return self._inputs["places"]

    @property
    def values(self) -> Tensor:
        """What the last run sampled, [2 or 4, sampled] int32."""
        assert self._values is not None, "the call was not run"
        return self._values

    def load(self, call: RaggedCall | None) -> None:
        """Queue the copy of a call's numbers into the buffer; None is padding alone."""
        buffer, arrays = self._fields.on_host(self._state.device)
        numbers = {} if call is None else call.arrays
        arrays.pop("used")[0] = len(numbers.get("token_ids", ()))
        for name, array in arrays.items():
            real = numbers.get(name, ())
            array[: len(real)] = real
            array[len(real) :] = self._padding.get(name, 0)
        self._buffer.copy_(buffer, non_blocking=True)

    def run(self, attend: Attend) -> None:
        """Compute what was loaded; leaves what it sampled in `values`."""
        inputs, state = self._inputs, self._state
        tokens, values = self._compute(
            state.resolve(inputs["token_ids"], inputs["token_slots"]),
            inputs["positions"],
            self._layout(attend),
            inputs["rows"],
            inputs["row_slots"],
            truncates=self.shape.truncates,
        )
        state.last_tokens.index_copy_(0, inputs["kept_in"], tokens)
        if self._values is None:  # in the first run, which comes before a capture
            self._values = torch.empty_like(values)
        self._values.copy_(values)

    def results(self, q: Tensor, *_: object) -> Tensor:
        """What stands for attention in a run on padding: its memory as it is."""
        if self._results is None:
            self._results = self._attended(q)
        return self._results

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


@dataclass(frozen=True, eq=False)
class CapturedPadded:
    """A padded call, how to run it again as captured, and what keeps alive what the graphs read."""

    call: PaddedCall
    replay: Callable[[PagedAttention], None]
    kept: object


class RaggedGraphs:
    """Captured padded calls by shape, in one pool of memory.

    `most` is the largest number of rows that is captured. `prepare` makes what must not be made
    during a capture, and returns what the graphs read and the model may replace.
    """

    def __init__(
        self,
        state: DeviceState,
        cache: KVCache,
        compute: Compute,
        *,
        most: int,
        prepare: Callable[[], object],
    ) -> None:
        self._state, self._cache, self._compute = state, cache, compute
        self._most, self._prepare = most, prepare
        self._room = most  # rows that there was memory for
        self._captured: dict[PaddedShape, CapturedPadded] = {}
        self._asked: dict[PaddedShape, int] = {}
        self._memory: Tensor | None = None
        # One stream for all captures: the pool gives memory back to the stream that freed it only.
        self._place: tuple[Any, torch.cuda.Stream] | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def drop(self) -> None:
        """Forget all graphs: what they read by address has moved."""
        if self._place is not None:
            torch.cuda.synchronize(self._state.device)
        self._captured.clear()
        self._asked.clear()
        self._place, self._room = None, self._most

    def captured(self, call: RaggedCall, *, truncates: bool) -> CapturedPadded | None:
        """A captured call with room for this one; None where it should run op by op."""
        rows, sampled = len(call.arrays["token_ids"]), len(call.arrays["rows"])
        shape = self.shape_for(rows, sampled, truncates=truncates)
        if shape is None:
            return None
        if shape not in self._captured:
            self._asked[shape] = self._asked.get(shape, 0) + 1
            if self._asked[shape] < CAPTURED_AT:
                return None
            if len(self._captured) >= MOST_CAPTURED:
                return None
            # A capture cannot take what the allocator holds for others, so it may try twice.
            captured = self._captured_in_memory(shape, last=False)
            captured = captured or self._captured_in_memory(shape, last=True)
            if captured is None:
                return None
            self._captured[shape] = captured
        return self._captured[shape]

    def _captured_in_memory(self, shape: PaddedShape, *, last: bool) -> CapturedPadded | None:
        """What `_capture` gives; None where memory is missing, which the `last` try says."""
        try:
            return self._capture(shape)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        if not self._captured:
            self._place = None  # torch has forgotten a pool that no graph uses
        if not last:
            torch.cuda.empty_cache()
            return None
        self._room = shape.rows - 1
        warnings.warn(
            f"no memory to capture a prefill of {shape.rows} rows ({reason}); calls of so many run "
            "op by op, with the same bits and more work for the host. Lower max_batch_tokens or "
            "num_kv_blocks.",
            stacklevel=2,
        )
        return None

    def shape_for(self, rows: int, sampled: int, *, truncates: bool) -> PaddedShape | None:
        """The shape for a call of so many rows; None where graphs gain nothing."""
        bucket = bucket_of(rows)
        if bucket > self._room:
            return None
        # More than these are in no call, unless drafts are verified without graphs.
        room = min(sampled_bucket_of(sampled), self._state.dummy_slot, bucket)
        if sampled > room:
            return None
        return PaddedShape(rows=bucket, sampled=room, truncates=truncates)

    def run_padding(self, rows: int, *, truncates: bool) -> None:
        """Run the call that `captured` would capture for so many rows, on padding alone."""
        if (shape := self.shape_for(rows, 1, truncates=truncates)) is not None:
            call = self._call(shape)
            with certified_to_the_row():
                call.run(call.results)

    def _call(self, shape: PaddedShape) -> PaddedCall:
        """The call, loaded with padding alone: running it touches no sequence."""
        call = PaddedCall(shape, self._state, self._cache, self._compute, self._attended)
        call.load(None)
        return call

    def _attended(self, q: Tensor) -> Tensor:
        """Memory for attention's results, shared by all calls."""
        rows = q.shape[0]
        if self._memory is None or self._memory.shape[0] < rows:
            # Calls that were captured keep a smaller one.
            size = (max(rows, min(self._most, SHARED_ROWS)), *q.shape[1:])
            self._memory = torch.zeros(size, dtype=q.dtype, device=q.device)
        return self._memory[:rows]

    def _capture(self, shape: PaddedShape) -> CapturedPadded:
        kept = self._prepare()
        call = self._call(shape)
        if self._place is None:
            self._place = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._state.device))
        pool, stream = self._place
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), certified_to_the_row():
            # The first run compiles kernels and certifies products, which a capture must not do.
            # In the second nothing of that is left to do.
            try:
                call.run(call.results)
                call.run(call.results)
            finally:
                # What the call holds may be given away once it is dropped.
                current.wait_stream(stream)
        pieces = GraphPieces(pool, stream)

        def interrupted(q: Tensor, k: Tensor, v: Tensor, *numbers: Any) -> Tensor:
            operands = [borrowed(x) for x in (q, k, v)]
            pieces.interrupt(partial(call.attention, *operands, *numbers))
            return call.results(q)

        with certified_to_the_row():
            pieces.capture(lambda: call.run(interrupted))
        return CapturedPadded(call, pieces.replay, kept)
