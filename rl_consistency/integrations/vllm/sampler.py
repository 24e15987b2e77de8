"""The distribution, the draw and the logprobs of this library in the place of vLLM's sampler.

On a GPU the launches of a step are one CUDA graph. All are captured at vLLM's first call of the
sampler: while it measures memory, before there are requests.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rl_consistency.integrations.vllm.requests import asked
from rl_consistency.models.graph_cache import Captured, GraphCache, GraphPieces
from rl_consistency.rollout.device.decode_graphs import buckets_up_to
from rl_consistency.rollout.device.device_state import to_device
from rl_consistency.rollout.device.sampling_table import SamplingTable
from rl_consistency.rollout.sampling_params import Truncation

_log = logging.getLogger(f"vllm.{__name__}")  # for vLLM's handlers

MOST_CAPTURED_ROWS = 256
"""Rows of the largest graph: from here on the device takes longer than the host does to launch. A
graph has a copy of its logits."""

RANKED_ROWS = 32
"""Rows whose most likely ids are looked up together, at 8 bytes for each id of the vocabulary."""

Drawn = tuple[Tensor, Tensor, Tensor]
"""Token ids [n, 1 + k] int64, the drawn one first; their logprobs fp32; the drawn ones' ranks [n]
int64, a rank being the number of ids whose logit is at least the token's."""


class ModelState(DefaultModelState):
    """vLLM's state of a model, with the sampler below."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        """The sampler, and no rejection sampler: drafts are not covered."""
        return Sampler(sampler, graphs=not self.model_config.enforce_eager), None

    def preprocess_state(self, input_batch: Any, *_: Any) -> None:
        self.model.begin_step(input_batch.num_computed_tokens_np)


class Sampler:
    """Stands for vLLM's `Sampler`, `base`, which keeps what vLLM itself reads there.

    A logprob is that of the distribution that the token is drawn from. A greedy token has the
    logprob 0, or that of the softmax with `greedy_logprobs="full"` in its request's `extra_args`.
    """

    def __init__(self, base: Any, *, graphs: bool) -> None:
        self._base, self._graphed = base, graphs
        self._device: torch.device = base.req_states.device
        self._most: int = base.sampling_states.max_num_reqs
        self._written: dict[int, None] = {}  # slots to copy, in order
        self._graphs: SamplerGraphs | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    @cached_property
    def _table(self) -> SamplingTable:
        # Not made with the model, whose memory is lost when vLLM sleeps.
        return SamplingTable(self._most, self._device)

    def add_request(self, slot: int, *others: Any) -> None:
        """vLLM's, of a request's slot, and of its SamplingParams last.

        It does not raise: vLLM's warm-up asks for all there is, and an error ends the engine.
        """
        self._base.add_request(slot, *others)
        given = others[-1]
        try:
            found = asked(given, int(self._base.sampling_states.seeds.np[slot]) % 2**64)
        except ValueError as error:
            if given != type(given).for_sampler_warmup():
                _log.error("A request gets NaN logprobs and token 0: %s", error)
            self._table.withhold(slot)
        else:
            self._table.write(slot, *found)
        self._written[slot] = None

    def apply_staged_writes(self) -> None:
        self._base.apply_staged_writes()
        if self._written:
            slots = np.fromiter(self._written, dtype=np.int64, count=len(self._written))
            self._written.clear()
            new = to_device({"slots": slots, **self._table.written(slots)}, self._device)
            self._table.load(new["slots"], new)

    def __call__(self, logits: Tensor, batch: Any) -> SamplerOutput:
        """Draw from logits [n, V] fp32 of a step's requests, one row each."""
        if self._graphs is None and self._graphed and logits.is_cuda:
            self._graphs = SamplerGraphs(self._table, min(self._most, MOST_CAPTURED_ROWS), logits)
        count = self._base.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        truncates = self._table.truncates(batch.idx_mapping_np)
        rows = logits, batch.expanded_idx_mapping, batch.positions[batch.logits_indices], truncates
        if count <= 0 and self._graphs is not None and len(logits) <= self._graphs.most:
            drawn = self._graphs.draw(*rows)
        else:
            drawn = draw(self._table, *rows, max(count, 0))
        num_nans = None
        if self._base.compute_nans:
            num_nans = logits.isnan().sum(dim=1, dtype=torch.int32) + drawn[1][:, 0].isnan()
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self._base.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=drawn[0][:, :1].contiguous(),
            logprobs_tensors=LogprobsTensors(*drawn) if count >= 0 else None,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def draw(
    table: SamplingTable,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    truncates: Truncation,
    count: int = 0,
) -> Drawn:
    """`SamplingTable.draw`, with the `count` most likely ids of each row."""
    tokens, logprobs_of = table.draw(logits, slots, positions, truncates)
    ids = tokens.unsqueeze(1)
    ranks = (logits >= logits.gather(1, ids)).sum(dim=1)
    if count:
        ids = torch.cat([ids, most_likely(logits, count)], dim=1)
    logprobs = [logprobs_of(column.contiguous()) for column in ids.unbind(1)]
    return ids, torch.stack(logprobs, dim=1), ranks


def most_likely(logits: Tensor, count: int) -> Tensor:
    """The ids [n, count] int64 of each row's largest logits, downward; of equal ones the lower."""
    ids, found = torch.arange(logits.shape[1], device=logits.device), []
    for part in logits.split(RANKED_ROWS):
        bits = (part + 0.0).view(torch.int32)  # -0 becomes 0
        key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        # Keys that all differ: how topk orders equal ones is not said.
        found.append(torch.topk((key << 32) - ids, count, dim=1).indices)
    return torch.cat(found)


class SamplerGraphs(GraphCache[tuple[int, Truncation], Captured[Drawn]]):
    """`draw` without other ids, captured for each bucket of up to `most` rows and each truncation,
    of logits like those given."""

    def __init__(self, table: SamplingTable, most: int, like: Tensor) -> None:
        super().__init__()
        self._table, self.most, self._buckets = table, most, buckets_up_to(most)
        numbers = (torch.zeros(most, dtype=torch.int64, device=like.device) for _ in range(2))
        self._inputs = (like.new_zeros(most, like.shape[1]), *numbers)
        for truncates in Truncation:
            # The largest first: the others fit in the memory it leaves.
            for rows in reversed(self._buckets):
                self.get((rows, truncates), rows)

    def _capture(self, shape: tuple[int, Truncation], *_: Any) -> Captured[Drawn]:
        rows, truncates = shape
        logits, slots, positions = (x[:rows] for x in self._inputs)
        drawn: Any = None

        def run(_: GraphPieces | None) -> None:
            nonlocal drawn  # at last the graph's own, whose memory is kept with them
            drawn = draw(self._table, logits, slots, positions, truncates)

        replay = self.in_place(logits.device).captured(run).replay
        return Captured(drawn, replay, None)

    def draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, truncates: Truncation
    ) -> Drawn:
        """`draw`, by the smallest graph with room. The results are the caller's."""
        count = len(logits)
        rows = self._buckets[bisect_left(self._buckets, count)]
        found = self.get((rows, truncates), rows)
        assert found is not None
        for to, value in zip(self._inputs, (logits, slots, positions), strict=True):
            to[:count].copy_(value)
        found.replay()
        # vLLM reads them while the next replay writes the graph's own.
        ids, logprobs, ranks = (x[:count].clone() for x in found.call)
        return ids, logprobs, ranks
