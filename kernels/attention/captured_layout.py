"""The paged layouts of calls that CUDA graphs capture: whole, where only the device knows their
lengths, or without attention, which is launched between the graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    AttentionLayout,
    PackedSequences,
    PagedAttention,
    SequenceTables,
    TilePlan,
)
from rl_consistency.kernels.attention.shared_keys import MOST_SHARERS, SharedRun


@dataclass(frozen=True, kw_only=True)
class CapturedPagedAttention(PagedAttention):
    """Equally many query rows for each sequence, with lengths that only the device knows.

    A CUDA graph replays with other values in `numbers`; the host's lists are upper bounds that only
    choose schedules. A sequence that needs fewer rows uses the first ones; the others give 0.
    """

    exact: ClassVar[bool] = False
    settled: ClassVar[bool] = True
    numbers: SequenceTables
    """Lengths, block tables and shared keys of the next run, within the host's bounds. They are
    written before its first layer: attention reads them ahead of its turn (`settled`)."""

    @classmethod
    def of(
        cls,
        numbers: SequenceTables,
        *,
        queries: int,
        capacity: int,
        slot_mapping: Tensor,
        key_cache: Sequence[Tensor],
        value_cache: Sequence[Tensor],
        block_size: int,
    ) -> CapturedPagedAttention:
        """`queries` rows for each sequence of `numbers`, contexts of at most `capacity` keys."""
        sequences = numbers.query_len.shape[0]
        return cls(
            query_starts=range(0, sequences * queries, queries),
            query_lens=[min(queries, capacity)] * sequences,
            context_lens=[capacity] * sequences,
            block_tables=(),
            slot_mapping=slot_mapping,
            key_cache=key_cache,
            value_cache=value_cache,
            block_size=block_size,
            numbers=numbers,
        )

    def __post_init__(self) -> None:
        AttentionLayout.__post_init__(self)
        blocks = self.numbers.block_table.shape[1]
        if max(self.context_lens, default=0) > blocks * self.block_size:
            raise ValueError(
                f"paged attention: contexts of up to {max(self.context_lens)} tokens but the "
                f"tables' {blocks} blocks hold {blocks * self.block_size}."
            )

    def owns(self, rows: int) -> bool:
        """Whether every row is surely a query: False with several rows per sequence."""
        return max(self.query_lens, default=1) == 1 and super().owns(rows)

    @property
    def shares_keys(self) -> bool:
        return self.numbers.shared is not None

    def tables(self, device: torch.device) -> SequenceTables:
        return self.numbers

    def block_table(self) -> Tensor:
        return self.numbers.block_table

    def by_past(self) -> tuple[None, PagedAttention]:
        """All sequences as they are: only the device knows which of them have a past."""
        return None, self

    def most_shared_queries(self) -> int:
        # The starts are a range, so all distances are the same.
        last = min(MOST_SHARERS, len(self.query_lens)) - 1
        return self.query_starts[last] - self.query_starts[0] + self.query_lens[last]

    def plan(self, group: int, window: int | None) -> TilePlan:
        """The plan of the current `numbers`, not kept; only a CPU asks for it."""
        return self.in_force().plan(group, window)

    def in_force(self) -> PagedAttention:
        """The layout of the current `numbers`, on the host."""
        shared = self.numbers.shared and self.numbers.shared.runs.tolist()
        return PagedAttention(
            query_starts=self.numbers.query_start.tolist(),
            query_lens=self.numbers.query_len.tolist(),
            context_lens=self.numbers.context_len.tolist(),
            block_tables=self.numbers.block_table.tolist(),
            slot_mapping=self.slot_mapping,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            block_size=self.block_size,
            shared_runs=() if shared is None else [SharedRun(*r) for r in shared if r[2]],
        )


Attend = Callable[[Tensor, Tensor, Tensor, int, float, int | None], Tensor]
"""(q, k, v, layer, scale, window) -> o [T, H, D]; see `attention_paged`."""


@dataclass(frozen=True, kw_only=True)
class InterruptedAttention(PagedAttention):
    """The layout of a call whose other ops are captured: `attend` stands in for attention.

    Every replay has a layout of its own for the attention. To other ops the tokens are one sequence
    from row 0 on, whose length the device knows.
    """

    attend: Attend
    numbers: SequenceTables

    @classmethod
    def of(
        cls,
        attend: Attend,
        used: Tensor,
        *,
        slot_mapping: Tensor,
        key_cache: Sequence[Tensor],
        value_cache: Sequence[Tensor],
        block_size: int,
    ) -> InterruptedAttention:
        """A layout that writes the new tokens' keys and values to `slot_mapping`; `used` [1] int32
        is the number of rows that are tokens."""
        table = torch.zeros(1, 1, dtype=torch.int32, device=used.device)
        return cls(
            query_starts=(),
            query_lens=(),
            context_lens=(),
            block_tables=(),
            slot_mapping=slot_mapping,
            key_cache=key_cache,
            value_cache=value_cache,
            block_size=block_size,
            attend=attend,
            numbers=SequenceTables(torch.zeros_like(used), used, used, table),
        )

    def tables(self, device: torch.device) -> SequenceTables:
        return self.numbers


@dataclass(frozen=True, kw_only=True)
class InterruptedSequences(PackedSequences):
    """The layout of a training call whose other ops are captured; those ask it nothing."""

    attend: Attend

    @classmethod
    def by(cls, attend: Attend) -> InterruptedSequences:
        """A layout without sequences, whose attention is `attend`."""
        return cls(query_starts=(), query_lens=(), context_lens=(), attend=attend)
