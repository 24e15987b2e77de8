"""The layouts of one step of vLLM, made of its attention metadata.

vLLM's tables stay where they are on the device. Its lengths on the host are exact, or the step is
refused: a bound in place of a length would give attention keys that no step has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    AttentionLayout,
    CapturedPagedAttention,
    PackedSequences,
    PagedAttention,
    SequenceTables,
    from_host,
)


class CacheViews(TypedDict):
    """Where keys and values of all layers lie; see `PagedAttention`."""

    key_cache: Sequence[Tensor]
    value_cache: Sequence[Tensor]
    block_size: int


@dataclass(frozen=True, kw_only=True)
class StepAttention(PagedAttention):
    """Sequences of a step that attention is launched for at once: their lengths on the host, their
    tables in vLLM's memory. All of them are whole prompts, or none is."""

    numbers: SequenceTables

    def __post_init__(self) -> None:
        AttentionLayout.__post_init__(self)

    def tables(self, device: torch.device) -> SequenceTables:
        return self.numbers

    def block_table(self) -> Tensor:
        return self.numbers.block_table

    def rows(self) -> Tensor:
        """The rows of the sequences' queries."""
        spans = zip(self.query_starts, self.query_lens, strict=True)
        return torch.cat([torch.arange(start, start + count) for start, count in spans])

    def by_past(self) -> tuple[PackedSequences | None, PagedAttention | None]:
        if self.query_lens != self.context_lens:
            return None, self
        packed = PackedSequences.of
        return self.kept(("packed",), lambda: packed(self.query_starts, self.query_lens)), None


class Step:
    """One step: `common` is vLLM's `CommonAttentionMetadata`."""

    def __init__(self, common: Any, *, for_capture: bool = False) -> None:
        self.common, self.for_capture = common, for_capture
        self._layouts: list[StepAttention] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token, as in a captured decode step."""
        return self.common.max_query_len == 1

    def used(self) -> Tensor:
        """[1] int32 on the device: the rows that are tokens; the rest is padding."""
        return self.common.query_start_loc[-1:].clone()

    def layouts(self, cache: CacheViews) -> list[StepAttention]:
        """The sequences with tokens, in up to three launches of attention: those with one token,
        chunks behind a past, and whole prompts, whose keys are read where they are made."""
        if self._layouts is None:
            self._layouts = self._made(cache)
        return self._layouts

    def _made(self, cache: CacheViews) -> list[StepAttention]:
        starts = self.common.query_start_loc_cpu.numpy()
        lens, starts = np.diff(starts), starts[:-1]
        contexts = self.common.seq_lens_cpu_upper_bound.numpy()[: len(lens)]
        one, whole = lens == 1, (lens > 1) & (lens == contexts)
        kinds = one, (lens > 1) & ~whole, whole
        return [
            self._layout(np.flatnonzero(kind), starts, lens, contexts, cache)
            for kind in kinds
            if kind.any()
        ]

    def _layout(
        self,
        chosen: NDArray[Any],
        starts: NDArray[Any],
        lens: NDArray[Any],
        contexts: NDArray[Any],
        cache: CacheViews,
    ) -> StepAttention:
        common, count = self.common, len(chosen)
        begin = common.query_start_loc[:-1]
        numbers = begin, common.query_start_loc[1:] - begin, common.seq_lens
        tables = *numbers, common.block_table_tensor
        if chosen[-1] == count - 1:  # vLLM puts sequences with one token first
            tables = [table[:count] for table in tables]
        else:
            index = from_host(torch.from_numpy(chosen), begin.device)
            tables = [table.index_select(0, index) for table in tables]
        return StepAttention(
            query_starts=starts[chosen].tolist(),
            query_lens=lens[chosen].tolist(),
            context_lens=contexts[chosen].tolist(),
            block_tables=(),
            slot_mapping=common.slot_mapping,
            numbers=SequenceTables(*tables),
            **cache,
        )


class DecodeLayouts:
    """The layout of a captured decode step, for each number of sequences: it reads what vLLM
    rewrites in place, and what does not fit is computed inside the graph."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._made: dict[int, CapturedPagedAttention] = {}

    def layout(self, step: Step, cache: CacheViews) -> CapturedPagedAttention:
        """The layout of a step of which all sequences have one token, or none where they pad."""
        common, rows = step.common, step.common.num_reqs
        lens, table = common.seq_lens, common.block_table_tensor
        found = self._made.get(rows)
        if found is None or found.block_table().data_ptr() != table.data_ptr():
            ones = torch.ones(rows, dtype=torch.int32, device=lens.device)
            first = torch.arange(rows, dtype=torch.int32, device=lens.device)
            numbers = first, ones, ones.clone(), table
            found = CapturedPagedAttention.of(
                SequenceTables(*numbers, token_len=ones.clone()),
                queries=1,
                # vLLM may have lowered its longest context since.
                capacity=min(self._capacity, table.shape[1] * cache["block_size"]),
                slot_mapping=torch.zeros(rows, dtype=torch.int64, device=lens.device),
                **cache,
            )
            self._made[rows] = found
        # Padding has no key, and attention needs one.
        torch.clamp(lens, min=1, out=found.numbers.context_len)
        torch.clamp(lens, max=1, out=found.numbers.tokens)
        torch.clamp(common.slot_mapping, min=0, out=found.slot_mapping)
        return found
