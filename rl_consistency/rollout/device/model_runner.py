"""Owns the KV cache and the device state, and turns a step's chunks into tokens and logprobs.

A launch never waits for the device, unless it captures graphs, so the next step can be queued
behind it. The token that the step before samples is read on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.attention.layout import PagedAttention, SharedRun
from rl_consistency.models.forward import (
    attend_to_anything,
    layer_parameters,
    next_token_logits,
    paged_hidden_states,
    rotary_rows,
)
from rl_consistency.models.graph_cache import Captured
from rl_consistency.models.moe import recorded_routing
from rl_consistency.models.patch import forward_path
from rl_consistency.numerics.strict import current
from rl_consistency.rollout.block_manager import KVCache
from rl_consistency.rollout.device.calls import RaggedCall, RaggedShape
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs, width_for
from rl_consistency.rollout.device.device_state import DeviceState, to_device, to_host
from rl_consistency.rollout.device.ragged_graphs import PaddedCall, RaggedGraphs, most_rows
from rl_consistency.rollout.drafter import MAX_DRAFT
from rl_consistency.rollout.sampling_params import Truncation
from rl_consistency.rollout.scheduler import SampledTokens, ScheduledChunk
from rl_consistency.rollout.weights import ForwardPath

MEMORY_BOUND_TOKENS = 256  # up to here reading the weights takes longer than multiplying by them
RAGGED = 0  # in place of a width: chunks that run without a graph

_Group = dict[int, ScheduledChunk]  # the chunks of one call, by their index in the step

SampledRows = tuple[Tensor, Sequence[int], NDArray[np.int64], NDArray[np.int64]]
"""What one call sampled, [2 or 3, rows] int64 on the host: token ids, the bits of their fp32
logprobs and, in a sparse model, their routing. And of each chunk: its index in the step, its first
row, and its number of rows."""


class _ReadByGraphs(NamedTuple):
    """What graphs depend on: where the tensors lie that they read, and what was captured."""

    addresses: list[object]
    path: ForwardPath
    withdrawals: int


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A step that has been queued."""

    chunks: list[ScheduledChunk]  # those that sample, in the order of the launch
    calls: list[SampledRows]
    done: torch.cuda.Event | None
    replayed_prefill: bool  # whether chunks of several tokens ran through graphs

    @property
    def is_busy(self) -> Callable[[], bool] | None:
        """Tells whether the device still works on it; None on a CPU, where all is done."""
        done = self.done
        return None if done is None else lambda: not done.query()

    def wait(self) -> list[SampledTokens]:
        """Wait for this step alone; returns what each of `chunks` sampled, a NaN logprob where the
        row's logits are."""
        if self.done is not None:
            self.done.synchronize()
        sampled: dict[int, SampledTokens] = {}
        for values, indices, firsts, counts in self.calls:
            columns = values[0], values[1].to(torch.int32).view(torch.float32), *values[2:]
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            spans = zip(indices, firsts.tolist(), counts.tolist(), strict=True)
            sampled |= {index: rows[first : first + count] for index, first, count in spans}
        return [sampled[index] for index in sorted(sampled)]


class ModelRunner:
    """Runs the model over a paged KV cache of a `size` as `cache_shape` takes it; reads its weights
    in place, call by call.

    On a GPU decode chunks run through CUDA graphs, and so do other chunks where the host would take
    longer than the device, unless `cuda_graphs` is False. That moves no bit.
    """

    def __init__(
        self, model: Any, *, max_num_seqs: int, cuda_graphs: bool = True, **size: Any
    ) -> None:
        self._model = model
        self._cache = KVCache.allocate(model, max_num_seqs=max_num_seqs, **size)
        self.block_size, self.device = self._cache.block_size, self._cache.keys[0].device
        self.num_blocks = self._cache.num_blocks
        most_tokens = self.num_blocks * self.block_size
        self.capacity = min(model.config.max_position_embeddings, most_tokens)
        self._state = DeviceState(
            max_num_seqs,
            width=-(-self.capacity // self.block_size),
            block_size=self.block_size,
            dummy_block=self.num_blocks,
            device=self.device,
        )
        self.admit = self._state.admit
        self._captured_from = self._read_by_graphs(0)
        self._stream = self._current_stream()
        self.decode_graphs: DecodeGraphs | None = None
        self.ragged_graphs: RaggedGraphs | None = None
        if cuda_graphs and self.device.type == "cuda":
            most = most_rows(layer_parameters(model))
            self.decode_graphs = DecodeGraphs(*self.parts, capacity=self.capacity)
            self.ragged_graphs = RaggedGraphs(*self.parts, most=most)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What `CallGraphs` are made of."""
        return self._state, self._cache, self._compute, self.prepare

    def prepare(self) -> object:
        """Make the angles of all positions, which last: graphs read them by address."""
        return rotary_rows(self._model, self.capacity)

    def begin(self, withdrawals: int = 0, path: ForwardPath | None = None) -> None:
        """Look at the model before a rollout, whose forward has a `path` (None: look at that too);
        all steps of it belong to the current CUDA stream.

        Drops the graphs if parameters moved, if hooks or the patch were changed, or if library
        products were withdrawn, which `withdrawals` counts. ValueError if the model was moved or
        cast.
        """
        model, cache = self._model, self._cache.keys[0]
        if (model.dtype, model.device) != (cache.dtype, cache.device):
            raise ValueError(
                f"the KV cache is in {cache.dtype} on {cache.device} and the model now in "
                f"{model.dtype} on {model.device}; build the RolloutEngine after moving or casting"
            )
        captured_from, self._captured_from = (
            self._captured_from,
            self._read_by_graphs(withdrawals, path),
        )
        # A graph does not run what a hook does.
        if self.hooked or captured_from != self._captured_from:
            for graphs in (self.decode_graphs, self.ragged_graphs):
                if graphs is not None:
                    graphs.drop()
        self._stream = self._current_stream()

    @property
    def hooked(self) -> bool:
        """Whether modules had hooks at the last `begin`."""
        return self._captured_from.path[1].hooked

    def _read_by_graphs(self, withdrawals: int, path: ForwardPath | None = None) -> _ReadByGraphs:
        path = path or forward_path(self._model)  # which refuses tensors without an address
        return _ReadByGraphs(path[0].snapshot().addresses(), path, withdrawals)

    def _current_stream(self) -> int | None:
        """The current CUDA stream's handle; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).cuda_stream

    def run_padding(self, shape: RaggedShape, truncates: Truncation) -> None:
        """Run a call op by op that touches no sequence."""
        self._run(RaggedCall.padding(shape, self._state, self.block_size), truncates)

    def attend_padding(self, shape: RaggedShape) -> None:
        """Run the attention of such a call alone, once for each window of the layers."""
        call = RaggedCall.padding(shape, self._state, self.block_size)
        places = torch.from_numpy(call.arrays["places"]).to(self.device)
        attend_to_anything(self._model, call.paged(self._cache, places))

    @torch.no_grad()
    def launch(self, chunks: Sequence[ScheduledChunk]) -> PendingStep:
        """Queue the chunks' computation: write keys and values, sample tokens.

        Every chunk's sequence was admitted and holds blocks up to the chunk's end. ValueError for a
        draft longer than `MAX_DRAFT`, and on another CUDA stream than at `begin`.
        """
        if self._stream != (now := self._current_stream()):
            raise ValueError(
                f"the rollout began on CUDA stream {self._stream} and a step was asked for on "
                f"{now}; give all steps the same stream, or one would not wait for those before"
            )
        groups = self._grouped(chunks)
        others = groups.pop(RAGGED, {})
        # All calls are staged before any runs: one copy brings the device's tables up to date.
        staged = [self._stage(width, group) for width, group in groups.items()]
        ragged = RaggedCall.of(list(others.values()), self._state) if others else None
        self._state.flush()
        calls, captured = [replay() for replay in staged], None
        if ragged is not None:
            truncates = self._state.sampling.truncates(ragged.arrays["row_slots"])
            captured = self._captured(ragged, truncates)
            values = self._run(ragged, truncates, captured)
            if sampling := [index for index, chunk in others.items() if chunk.samples]:
                firsts = np.cumsum(ragged.counts) - ragged.counts
                calls.append((to_host(values), sampling, firsts, ragged.counts))
        sampling = [chunk for chunk in chunks if chunk.samples]
        return PendingStep(sampling, calls, self._mark(), captured is not None)

    def _grouped(self, chunks: Sequence[ScheduledChunk]) -> dict[int, _Group]:
        """The chunks by the width of their graph; `RAGGED` for those that run without one."""
        if (longest := max([len(c.draft) for c in chunks], default=0)) > MAX_DRAFT:
            raise ValueError(f"a draft of {longest} tokens; at most {MAX_DRAFT} are verified")
        graphs = self.decode_graphs is not None
        widths = [width_for(len(c.draft)) if graphs and c.is_decode else RAGGED for c in chunks]
        widest = max(widths, default=RAGGED)
        if sum(map(bool, widths)) * widest <= MEMORY_BOUND_TOKENS:
            # Each graph reads all weights; padding short drafts costs less than that.
            widths = [widest if width else RAGGED for width in widths]
        groups: dict[int, _Group] = {width: {} for width in sorted(set(widths))}
        for index, width in enumerate(widths):
            groups[width][index] = chunks[index]
        return groups

    def _stage(self, width: int, group: _Group) -> Callable[[], SampledRows]:
        """Fills a host buffer for the group's call, in which sequences that share keys are
        neighbours; the function returned queues its replay."""
        graphs, state, indices = self.decode_graphs, self._state, list(group)
        assert graphs is not None
        slots = np.array([chunk.sequence.slot for chunk in group.values()], dtype=np.int64)
        runs: Sequence[SharedRun] = ()
        if graphs.share_keys:
            pasts = np.array([chunk.start for chunk in group.values()], dtype=np.int64)
            arrangement = state.arrangement(slots, pasts, width=width)
            if arrangement is not None:
                order, runs = arrangement
                indices = [indices[i] for i in order]
        chunks = [group[index] for index in indices]
        call = RaggedCall.of(chunks, state)
        shape = graphs.shape_for(
            len(chunks),
            width,
            truncates=state.sampling.truncates(slots),
            longest=int(call.contexts.max()),
            shared=len(runs) > 0,
        )
        captured = graphs.captured(shape)
        buffer = captured.call.stage(call, runs)

        def replay() -> SampledRows:
            captured.call.load(buffer)
            captured.replay()
            firsts = np.arange(len(chunks)) * width
            return to_host(captured.call.values), indices, firsts, call.counts

        return replay

    def _captured(self, call: RaggedCall, truncates: Truncation) -> Captured[PaddedCall] | None:
        """The graphs for a call; None where it runs op by op."""
        graphs = self.ragged_graphs
        if graphs is None or self.hooked or current().stock:
            return None
        return graphs.captured(call, truncates=truncates)

    def _run(
        self, call: RaggedCall, truncates: Truncation, captured: Captured[PaddedCall] | None = None
    ) -> Tensor:
        """A call of chunks of any lengths, by graphs if given; the values of its sampled rows."""
        if captured is None:
            inputs = to_device(call.arrays, self.device)
            return self._compute(inputs, call.paged(self._cache, inputs["places"]), truncates)
        padded = captured.call
        padded.load(padded.stage(call))
        padded.clear(len(call.arrays["token_ids"]))
        captured.replay(call.paged(self._cache, padded.inputs["places"]))
        return padded.values

    def _compute(
        self, inputs: Mapping[str, Tensor], layout: PagedAttention, truncates: Truncation
    ) -> Tensor:
        """The model over all tokens of a call, and the sampler over its `rows`, or all without.

        `inputs` are those of `RaggedCall.arrays`. Returns values [2 or 3, n], see `SampledRows`: a
        token for the position after each row, which becomes the last one of the slot `kept_in`.
        """
        state, positions, rows = self._state, inputs["positions"], inputs.get("rows")
        token_ids = state.resolve(inputs["token_ids"], inputs["token_slots"])
        with recorded_routing() as record:
            hidden = paged_hidden_states(self._model, token_ids, positions, layout, rows)
        if not len(hidden):
            return torch.empty(2, 0, dtype=torch.int64, device=self.device)
        if rows is not None:
            positions = positions.index_select(0, rows)
        routing = record.fingerprints(rows)
        logits = next_token_logits(self._model, hidden)
        slots = inputs["row_slots"]
        tokens, logprobs_of = state.sampling.draw(logits, slots, positions, truncates)
        logprobs = logprobs_of(tokens)
        state.last_tokens.index_copy_(0, inputs["kept_in"], tokens)
        return torch.stack([tokens, logprobs.view(torch.int32).long(), *routing])

    def _mark(self) -> torch.cuda.Event | None:
        """An event behind everything queued so far; None on a CPU, where all is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event
