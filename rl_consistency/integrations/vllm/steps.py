"""The layouts of one step of vLLM, made of its attention metadata.

vLLM's tables stay where they are on the device. Its lengths on the host are exact, or the step is
refused: a bound in place of a length would give attention keys that no step has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    MOST_SHARERS,
    SHARED_BLOCK,
    AttentionLayout,
    CapturedPagedAttention,
    PackedSequences,
    PagedAttention,
    SequenceTables,
    SharedTables,
    from_host,
)
from rl_consistency.kernels.attention.schedules import reads_shared_keys_once
from rl_consistency.rollout.device.shared_prefixes import most_runs

SHARED_FROM = 32
"""Sequences of a decode step from which keys that some share are read once: finding them takes some
40 small launches, and reading them one in each layer."""


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

    def slots(self) -> Tensor:
        """[T] int64, where each row's keys are written: those of padding, for which vLLM says -1,
        in its block 0, which no sequence holds."""
        return self.common.slot_mapping.clamp(min=0)

    def layouts(self, cache: Callable[[], CacheViews]) -> list[StepAttention]:
        """The sequences with tokens, in up to three launches of attention: those with one token,
        chunks behind a past, and whole prompts, whose keys are read where they are made."""
        if self._layouts is None:  # the first layer asks
            self._layouts = list(self._launches(cache()))
        return self._layouts

    def _launches(self, cache: CacheViews) -> Iterator[StepAttention]:
        common = self.common
        if (bounds := common.seq_lens_cpu_upper_bound) is None:
            raise ValueError("rl_consistency in vLLM: a step has no lengths on the host.")
        borders, begin = common.query_start_loc_cpu.numpy(), common.query_start_loc[:-1]
        starts, lens = borders[:-1], np.diff(borders)
        contexts = bounds.numpy()[: len(lens)]  # exact without speculation, which is refused
        numbers = begin, common.query_start_loc[1:] - begin, common.seq_lens
        whole = (lens > 1) & (lens == contexts)
        for kind in (lens == 1, (lens > 1) & ~whole, whole):
            if not len(chosen := np.flatnonzero(kind)):
                continue
            tables = *numbers, common.block_table_tensor
            if chosen[-1] == len(chosen) - 1:  # vLLM puts sequences with one token first
                tables = [table[: len(chosen)] for table in tables]
            else:
                index = from_host(torch.from_numpy(chosen), begin.device)
                tables = [table.index_select(0, index) for table in tables]
            yield StepAttention(
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
        self._made: dict[tuple[int, ...], CapturedPagedAttention] = {}

    def layout(self, step: Step, cache: CacheViews) -> CapturedPagedAttention:
        """The layout of a step of which all sequences have one token, or none where they pad."""
        common, rows = step.common, step.common.num_reqs
        table = common.block_table_tensor
        # vLLM may capture over a small cache first, to see how much memory graphs take.
        place = rows, table.data_ptr(), cache["key_cache"][0].data_ptr()
        if (found := self._made.get(place)) is None:
            # It may have lowered its longest context since.
            capacity = min(self._capacity, table.shape[1] * cache["block_size"])
            found = self._made[place] = decode_layout(table, capacity, cache)
        numbers = found.numbers
        # Padding has no key, and attention needs one.
        torch.clamp(common.seq_lens, min=1, out=numbers.context_len)
        torch.clamp(common.seq_lens, max=1, out=numbers.tokens)
        found.slot_mapping.copy_(step.slots())
        if numbers.shared is not None:
            found_runs = shared_tables(table, numbers.context_len - 1, found.block_size)
            for kept, written in zip(numbers.shared, found_runs, strict=True):
                kept.copy_(written)
        return found


def decode_layout(table: Tensor, capacity: int, cache: CacheViews) -> CapturedPagedAttention:
    """A layout of sequences of one token each, with blocks `table` [n, width], n rows of padding
    now; keys that sequences share are read once where n is `SHARED_FROM` or more."""
    rows, int32 = len(table), {"dtype": torch.int32, "device": table.device}
    ones, shared = torch.ones(3, rows, **int32).unbind(0), None
    if rows >= SHARED_FROM and reads_shared_keys_once(cache["key_cache"][0]):
        runs = torch.zeros(most_runs(rows), 3, **int32)
        shared = SharedTables(runs, torch.zeros(rows, **int32))
    starts = torch.arange(rows, **int32)
    return CapturedPagedAttention.of(
        SequenceTables(starts, ones[0], ones[1].clone(), table, shared, ones[2].clone()),
        queries=1,
        capacity=capacity,
        slot_mapping=torch.zeros(rows, dtype=torch.int64, device=table.device),
        **cache,
    )


def shared_tables(table: Tensor, past: Tensor, block_size: int) -> SharedTables:
    """Runs of neighbours whose first keys lie in the same blocks, found on the device.

    `table` [n, width] int32 are blocks, entered as far as `past` [n] int32 keys reach. Samples of a
    prompt are neighbours where they came together. A run ends where its next sequence shares more
    with the one behind it. Runs that find no room are read by each of their sequences.
    """
    (count, width), device, room = table.shape, table.device, most_runs(len(table))
    rows, places = torch.arange(count, device=device), torch.arange(width, device=device)
    equal = torch.where(table[1:] == table[:-1], width, places).amin(dim=1) * block_size
    equal = torch.minimum(torch.minimum(equal, past[1:]), past[:-1]) // SHARED_BLOCK * SHARED_BLOCK
    left, right = F.pad(equal, (1, 0)), F.pad(equal, (0, 1))
    first = torch.where((left == 0) | (left < right), rows, 0).cummax(0).values
    first = rows - (rows - first) % MOST_SHARERS  # row of each row's run
    none = torch.iinfo(torch.int64).max
    keys = torch.full_like(rows, none)
    keys = keys.scatter_reduce(0, first, left.masked_fill(first == rows, none), "amin")
    counts = torch.zeros_like(rows).scatter_add(0, first, torch.ones_like(rows))
    place = (keys < none).cumsum(0) - 1
    kept = (keys < none) & (place < room)
    keys = keys.where(kept, 0)
    runs = torch.zeros(room + 1, 3, dtype=torch.int32, device=device)  # the last takes the others
    runs[place.where(kept, room)] = torch.stack([rows, counts, keys], dim=1).to(torch.int32)
    return SharedTables(runs[:room], keys[first].to(torch.int32))
