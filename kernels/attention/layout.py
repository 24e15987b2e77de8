"""Where the queries and keys of a call lie: packed sequences, or a paged cache.

Both describe the same thing to the attention order: for every sequence its new queries, their
positions, and the row in which each key of positions 0 .. context - 1 is stored. A layout is built
once per forward pass and shared by all layers, which also share its tile plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_consistency.kernels.attention.cache_write_triton import cache_write

ROW_TILE = 16
"""Query rows in one forward tile; the heads of a KV group at one position are neighbouring rows."""
KEY_BLOCK = 64
"""Keys in one step of the softmax fold, counted from the sequence's own first token."""


def from_host(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without waiting for the work queued there."""
    if device.type == "cuda" and not values.is_cuda:
        # From pageable memory the copy would wait for everything launched before it.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Index tensors of one layout for one number of query heads per KV head.

    Attributes:
        query_rows: [tiles, 16] row in the flattened [T * group] queries; 0 for filler.
        query_positions: [tiles, 16] position in the sequence; -1 for filler, which sees no key.
        sequence: [tiles] sequence of the tile.
        key_rows: [sequences, blocks * 64] storage row of each key; past the end the last key's row.
        first_block, last_block: [tiles] key blocks any of the tile's rows can see.
    """

    query_rows: Tensor
    query_positions: Tensor
    sequence: Tensor
    key_rows: Tensor
    first_block: Tensor
    last_block: Tensor


@dataclass(frozen=True, eq=False)
class SequenceTables:
    """One layout as int32 tensors on a GPU.

    Attributes:
        query_start, query_len, context_len: [sequences].
        block_table: [sequences, most blocks] physical blocks, or [1, 1] when keys are packed.
    """

    query_start: Tensor
    query_len: Tensor
    context_len: Tensor
    block_table: Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Queries of a call by sequence.

    Raises:
        ValueError: the lists differ in length, a length is negative, or a query lies past its
            context.
    """

    query_starts: Sequence[int]
    """Row in the packed [T, ...] call where each sequence's queries begin."""
    query_lens: Sequence[int]
    """Number of queries of each sequence."""
    context_lens: Sequence[int]
    """Number of keys of each sequence, its queries' own included."""
    _plans: dict[tuple[int, int | None], TilePlan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _tables: dict[torch.device, SequenceTables] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _owned: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tiles: dict[tuple[torch.device | float, ...], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not len(self.query_starts) == len(self.query_lens) == len(self.context_lens):
            raise ValueError(
                f"attention layout: {len(self.query_starts)} starts, {len(self.query_lens)} query "
                f"lengths and {len(self.context_lens)} context lengths; one of each per sequence."
            )
        for i, (queries, context) in enumerate(
            zip(self.query_lens, self.context_lens, strict=True)
        ):
            if not 0 <= queries <= context:
                raise ValueError(
                    f"attention layout: sequence {i} has {queries} queries and {context} keys; "
                    "0 <= queries <= keys."
                )

    def owns(self, rows: int) -> bool:
        """Whether each of the call's rows is a query of some sequence."""
        if "rows" not in self._owned:
            end = 0
            for start, queries in sorted(zip(self.query_starts, self.query_lens, strict=True)):
                if start > end:
                    break
                end = max(end, start + queries)
            self._owned["rows"] = end
        return self._owned["rows"] >= rows

    def key_rows(self, width: int) -> Tensor:
        """[sequences, width] storage row of each key position, the last key's row past the end."""
        raise NotImplementedError

    def key_rows_on(self, device: torch.device) -> Tensor:
        """`key_rows` of all contexts on a device, copied once."""
        key = (device, 0, 0)
        if key not in self._tiles:
            longest = max(self.context_lens, default=0)
            self._tiles[key] = from_host(self.key_rows(max(longest, 1)), device)
        return self._tiles[key]

    def plan(self, group: int, window: int | None) -> TilePlan:
        """The tile plan for `group` query heads per KV head, made once."""
        key = (group, window)
        if key not in self._plans:
            self._plans[key] = self._make_plan(group, window)
        return self._plans[key]

    def tables(self, device: torch.device) -> SequenceTables:
        """The layout's numbers on a device, copied once."""
        if device not in self._tables:
            numbers = torch.tensor(
                [list(self.query_starts), list(self.query_lens), list(self.context_lens)],
                dtype=torch.int32,
            )
            starts, lens, contexts = from_host(numbers, device).unbind(0)
            blocks = from_host(self.block_table(), device)
            self._tables[device] = SequenceTables(starts, lens, contexts, blocks)
        return self._tables[device]

    def block_table(self) -> Tensor:
        """[sequences, most blocks] int32 on the CPU; [1, 1] where keys are packed."""
        return torch.zeros(1, 1, dtype=torch.int32)

    def tiles(self, device: torch.device, group: int, rows_per_tile: int) -> Tensor:
        """[tiles, 2] int32 on a device: a sequence, and the tile's first row in it.

        A sequence's rows are its queries times the group's heads. Tiles that see most keys come
        first, so that the last ones to run are short.
        """
        key = (device, group, rows_per_tile)
        if key not in self._tiles:
            lens = torch.tensor(list(self.query_lens), dtype=torch.int64)
            past = torch.tensor(list(self.context_lens), dtype=torch.int64) - lens
            counts = -(-(lens * group) // rows_per_tile)
            sequence = torch.repeat_interleave(counts)
            tile = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
            first = tile * rows_per_tile
            reach = past[sequence] + first // group
            order = torch.argsort(reach, descending=True, stable=True)
            tiles = torch.stack([sequence, first], dim=1)[order].to(torch.int32)
            self._tiles[key] = from_host(tiles.contiguous(), device)
        return self._tiles[key]

    def tickets(self, device: torch.device, count: int) -> Tensor:
        """[count] int32 zeros on a device; each launch that counts in them leaves them zero.

        A layout is for one stream at a time.

        Raises:
            RuntimeError: a graph is being captured and nothing was run before it: its replay
                would count in memory that only the capture set to zero.
        """
        key = (device, -2, count)
        if key not in self._tiles:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "attention: this layout is captured before its first call; run the call once, "
                    "then capture it."
                )
            self._tiles[key] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._tiles[key]

    def _make_plan(self, group: int, window: int | None) -> TilePlan:
        starts, queries, contexts = (
            torch.tensor(list(values), dtype=torch.int64)
            for values in (self.query_starts, self.query_lens, self.context_lens)
        )
        tiles = -(-(queries * group) // ROW_TILE)
        sequence = torch.repeat_interleave(tiles)
        tile_in_sequence = torch.arange(len(sequence)) - (tiles.cumsum(0) - tiles)[sequence]
        flat = tile_in_sequence[:, None] * ROW_TILE + torch.arange(ROW_TILE)
        valid = flat < (queries * group)[sequence][:, None]
        token, head = flat // group, flat % group
        rows = ((starts[sequence][:, None] + token) * group + head).masked_fill(~valid, 0)
        positions = (contexts - queries)[sequence][:, None] + token
        # A tile's first row is never filler, so its position is the tile's earliest.
        earliest, positions = positions[:, 0], positions.masked_fill(~valid, -1)
        last = positions.amax(dim=1) // KEY_BLOCK if len(sequence) else sequence
        first = torch.zeros_like(last)
        if window is not None:
            first = (earliest - window + 1).clamp(min=0) // KEY_BLOCK
        width = (int(last.max()) + 1 if len(sequence) else 1) * KEY_BLOCK
        return TilePlan(
            query_rows=rows,
            query_positions=positions,
            sequence=sequence,
            key_rows=self.key_rows(width),
            first_block=first,
            last_block=last,
        )


@dataclass(frozen=True, kw_only=True)
class PackedSequences(AttentionLayout):
    """Whole sequences one after another, keys in the same rows as queries (training, scoring).

    Raises:
        ValueError: a sequence whose keys are not those of its queries.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.query_lens) != list(self.context_lens):
            raise ValueError(
                "packed sequences have one key per query; queries that continue a past need a "
                "PagedAttention layout."
            )

    @classmethod
    def of(cls, starts: Sequence[int], lens: Sequence[int]) -> PackedSequences:
        """Sequences that begin at `starts` and have `lens` tokens each."""
        return cls(query_starts=starts, query_lens=lens, context_lens=lens)

    def key_tiles(self, device: torch.device, keys_per_tile: int) -> Tensor:
        """[tiles, 2] int32 on a device: a sequence, and the tile's first key in it.

        Tiles that most queries see come first, so that the last ones to run are short.
        """
        # A key is seen by the queries after it, a query sees the keys before it: the same tiles.
        key = (device, 0, keys_per_tile)
        if key not in self._tiles:
            lens = torch.tensor(list(self.query_lens), dtype=torch.int64)
            counts = -(-lens // keys_per_tile)
            sequence = torch.repeat_interleave(counts)
            tile = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
            first = tile * keys_per_tile
            order = torch.argsort(lens[sequence] - first, descending=True, stable=True)
            tiles = torch.stack([sequence, first], dim=1)[order].to(torch.int32)
            self._tiles[key] = from_host(tiles.contiguous(), device)
        return self._tiles[key]

    def key_programs(
        self, device: torch.device, keys_per_tile: int, kv_heads: int, apart: float
    ) -> Tensor:
        """[tiles * kv_heads, 3] int32 on a device: a sequence, the tile's first key in it, and the
        KV head. The tiles of a sequence and head lie upward: `attention_backward_hopper` waits for
        the earlier ones and would wait for ever otherwise.

        Tiles of one sequence and head that run side by side wait for one another, then end
        together, and the next ones do the same. So sequences and heads are set up to `apart` tiles
        apart in the order: they end at different times, and their next tiles start one by one.
        """
        key = (device, -3, keys_per_tile, kv_heads, apart)
        if key not in self._tiles:
            lens = torch.tensor(list(self.query_lens), dtype=torch.int64)
            counts = -(-lens // keys_per_tile)
            sequence = torch.repeat_interleave(counts)
            tile = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
            head = torch.arange(kv_heads).repeat(len(sequence))
            sequence = sequence.repeat_interleave(kv_heads)
            first = tile.repeat_interleave(kv_heads) * keys_per_tile
            place = (sequence * kv_heads + head).double() / (len(lens) * kv_heads)
            reach = lens[sequence] - first - place * keys_per_tile * apart
            order = torch.argsort(reach, descending=True, stable=True)
            programs = torch.stack([sequence, first, head], dim=1)[order].to(torch.int32)
            self._tiles[key] = from_host(programs.contiguous(), device)
        return self._tiles[key]

    def query_tiles(self, device: torch.device, queries_per_tile: int) -> tuple[Tensor, Tensor]:
        """Tiles of queries in the order of their sequences, int32 on a device: [tiles, 2] a
        sequence, and the tile's first query in it; and [sequences] each sequence's first tile."""
        key = (device, -1, queries_per_tile)
        if key not in self._tiles:
            lens = torch.tensor(list(self.query_lens), dtype=torch.int64)
            counts = -(-lens // queries_per_tile)
            before = counts.cumsum(0) - counts
            sequence = torch.repeat_interleave(counts)
            first = (torch.arange(len(sequence)) - before[sequence]) * queries_per_tile
            tiles = torch.stack([sequence, first], dim=1).flatten()
            # Behind one another in one tensor: one copy.
            both = torch.cat([tiles, before]).to(torch.int32)
            self._tiles[key] = from_host(both, device)
        tiles, first_tiles = self._tiles[key].tensor_split([-len(self.query_lens)])
        return tiles.view(-1, 2), first_tiles

    def key_rows(self, width: int) -> Tensor:
        starts = torch.tensor(list(self.query_starts), dtype=torch.int64)
        return starts[:, None] + _clamped_positions(self.context_lens, width)


@dataclass(frozen=True, kw_only=True)
class PagedAttention(AttentionLayout):
    """New tokens of sequences whose keys and values live in a paged cache (rollout)."""

    block_tables: Sequence[Sequence[int]]
    """Physical block ids of each sequence in logical order, covering its context."""
    slot_mapping: Tensor
    """[T] int64, physical slot (block * block_size + offset) each new token is written to."""
    key_cache: Sequence[Tensor]
    """Per layer [num_blocks, block_size, num_kv_heads, head_dim]."""
    value_cache: Sequence[Tensor]
    """Per layer, the shape of `key_cache`."""
    block_size: int
    """Tokens in one physical block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, (table, context) in enumerate(
            zip(self.block_tables, self.context_lens, strict=True)
        ):
            if len(table) * self.block_size < context:
                raise ValueError(
                    f"paged attention: sequence {i} has {context} tokens but its {len(table)} "
                    f"blocks hold {len(table) * self.block_size}."
                )

    def block_table(self) -> Tensor:
        longest = max((len(table) for table in self.block_tables), default=0)
        filled = [[*table, *([0] * (longest - len(table)))] for table in self.block_tables]
        return torch.tensor(filled, dtype=torch.int32).view(len(filled), longest)

    def key_rows(self, width: int) -> Tensor:
        tables = self.block_table().long()
        positions = _clamped_positions(self.context_lens, width)
        blocks = tables.gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values, [T, Hkv, D], in their slots."""
        cache_write(k, v, self.key_cache[layer], self.value_cache[layer], self.slot_mapping)


def _clamped_positions(context_lens: Sequence[int], width: int) -> Tensor:
    """[sequences, width] key positions, the last key's past the end of a sequence."""
    last = torch.tensor(list(context_lens), dtype=torch.int64).sub(1).clamp(min=0)
    return torch.minimum(torch.arange(width)[None, :], last[:, None])
