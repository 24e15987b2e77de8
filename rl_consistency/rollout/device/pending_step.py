"""What a queued step samples, taken in when the device is done with it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_consistency.rollout.scheduler import SampledTokens, ScheduledChunk

SampledRows = tuple[Tensor, list[tuple[int, int, int]]]
"""What one call sampled: [2, rows] int32 on the host, token ids and the bits of their fp32
logprobs, in a sparse model [4, rows] with the two halves of their routing; and where each chunk's
rows are: (index in the step, first row, number of rows)."""


class PendingStep:
    """A step that has been queued; `chunks` are those that sample, in the order of the launch.
    `replayed_prefill`: whether chunks of several tokens ran through graphs."""

    def __init__(
        self,
        chunks: Sequence[ScheduledChunk],
        calls: list[SampledRows],
        done: torch.cuda.Event | None,
        *,
        replayed_prefill: bool = False,
    ) -> None:
        self.chunks = [chunk for chunk in chunks if chunk.samples]
        self._sampling = [chunk.samples for chunk in chunks]
        self._calls = calls
        self._done = done
        self.replayed_prefill = replayed_prefill

    def wait(self) -> list[SampledTokens]:
        """Wait for this step alone; returns what each of `chunks` sampled.

        A logprob is NaN where the row's logits are.
        """
        if self._done is not None:
            self._done.synchronize()
        sampled: list[SampledTokens] = [[] for _ in self._sampling]
        for values, spans in self._calls:
            columns = [values[0], values[1].view(torch.float32)]
            if len(values) > 2:
                halves = torch.stack((values[2], values[3]), dim=1)
                columns.append(halves.view(torch.int64).flatten())
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            for index, first, count in spans:
                sampled[index] = rows[first : first + count]
        return list(itertools.compress(sampled, self._sampling))
