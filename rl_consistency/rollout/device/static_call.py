"""What decoding and prefill have in common where they run through CUDA graphs.

A call reads one buffer that never moves, which the host fills for each step, and is padded to a
shape. Padding stands in the dummy slot and block, and moves no bit of a row (claim C1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PagedAttention
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.models.graph_cache import Captured, GraphCache, GraphPieces, Shape
from rl_consistency.rollout.block_manager import KVCache
from rl_consistency.rollout.device.device_state import DeviceState, Fields, StagedFields

Compute = Callable[[Mapping[str, Tensor], PagedAttention, bool], Tensor]
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
            **{"cells": slot * state.block_tables.shape[1], "blocks": block},
            **{"places": block * cache.block_size, "query_len": 1, "context_len": 1},
        }
        self.load(self.filled({}))

    def filled(self, numbers: Mapping[str, Any]) -> Tensor:
        """A host buffer with the numbers of a step, and padding behind them."""
        buffer, arrays = self._fields.on_host(self._state.device)
        for name, array in arrays.items():
            real = numbers.get(name, array[:0])
            array[: len(real)] = real
            array[len(real) :] = self._padding.get(name, 0)
        return buffer

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
        """What the last run sampled, [2 or 4, rows] int32."""
        assert self._values is not None, "the call was not run"
        return self._values


Call = TypeVar("Call", bound=StaticCall)


class CallGraphs(GraphCache[Shape, Captured[Call]]):
    """Captured calls by shape.

    `prepare` makes what must not be made during a capture, and returns what the graphs read and the
    model may replace.
    """

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
