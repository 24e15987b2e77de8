"""Where the queries and keys of a call lie: packed sequences, or a paged cache.

A layout gives every sequence's new queries, their positions, and the row of each key it has. It is
built once per forward pass; all layers share it, its tables on the device and its lists of tiles.
Runs of sequences whose first keys lie in the same blocks may have these keys read once; that is a
schedule and moves no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv

ROW_TILE = 16
"""Query rows in one CPU tile; the heads of a KV group at one position are neighbours."""
KEY_BLOCK = 64
"""Keys in one step of the CPU's softmax fold, counted from the sequence's first token."""

NEAR_KEYS = 16384
"""Keys of the sequences whose tiles run near each other: 8 MiB of K and V for one head of 128."""

MOST_SHARERS = 8
"""Most sequences of a run; a larger group makes several runs."""
SHARED_BLOCK = 128
"""Shared keys are read once in whole blocks of so many; the rest of them by each sequence."""

Attend = Callable[[Tensor, Tensor, Tensor, int, float, int | None], Tensor]
"""(q, k, v, layer, scale, window) -> o [T, H, D]; see `attention_paged`."""
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Kept = TypeVar("_Kept")


def from_host(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting for the work queued there."""
    if device.type == "cuda" and not values.is_cuda:
        # A copy from pageable memory would wait for all earlier launches.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class SharedRun(NamedTuple):
    """Consecutive sequences of a call that share keys. Example: SharedRun(4, 8, 2048) says that the
    first 2,048 keys of sequences 4 to 11 lie in the same blocks."""

    first: int
    count: int  # sequences, 2 to `MOST_SHARERS`
    keys: int
    """Number of shared keys; all stand before the first query of each sequence."""


class SharedTables(NamedTuple):
    """The runs of a call as int32 tensors on a GPU."""

    runs: Tensor
    """[runs, 3]: first sequence, number of sequences, keys; 0 keys where there is no run."""
    keys: Tensor
    """[sequences]: the keys that each shares with its run."""


def shared_arrays(
    runs: Sequence[SharedRun], most: int, sequences: int
) -> tuple[list[list[int]], list[int]]:
    """`SharedTables` as lists, filled up to `most` runs."""
    rows = [list(run) for run in runs]
    keys = [0] * sequences
    for run in runs:
        keys[run.first : run.first + run.count] = [run.keys] * run.count
    return rows + [[0, 0, 0]] * (most - len(runs)), keys


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Index tensors of the CPU schedule, for one number of query heads per KV head."""

    query_rows: Tensor
    """[tiles, 16] row in the flattened [T * group] queries; 0 for filler."""
    query_positions: Tensor
    """[tiles, 16] position in the sequence; -1 for filler, which sees no key."""
    sequence: Tensor  # [tiles]
    key_rows: Tensor
    """[sequences, blocks * 64] storage row of each key; past the end the last key's row."""
    first_block: Tensor  # [tiles], first and last key block that any row of the tile sees
    last_block: Tensor


@dataclass(frozen=True, eq=False)
class SequenceTables:
    """One layout as int32 tensors on a GPU: [sequences] numbers and the block table."""

    query_start: Tensor
    query_len: Tensor
    context_len: Tensor
    block_table: Tensor  # [sequences, most blocks] physical blocks; [1, 1] when keys are packed
    shared: SharedTables | None = None  # None where no sequences share keys
    token_len: Tensor | None = None
    """Queries that are tokens, where some are not: the padding of a graph has a query each, and no
    token. None: all are."""

    @property
    def tokens(self) -> Tensor:
        """[sequences] int32, the rows of each sequence that are its tokens."""
        return self.query_len if self.token_len is None else self.token_len


def _once(method: _Method) -> _Method:
    """Make a layout's method run once for each list of arguments."""

    @wraps(method)
    def call(self: AttentionLayout, *arguments: object) -> Any:
        return self.kept((method.__name__, *arguments), lambda: method(self, *arguments))

    return cast("_Method", call)


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Queries of a call by sequence; ValueError on lengths that do not fit each other."""

    exact: ClassVar[bool] = True
    """Whether the lengths are those of the call, not just bounds of them."""
    settled: ClassVar[bool] = False
    """Whether lengths and tables are written before a pass's first layer, and a launch that does
    not overlap follows. Attention then reads them while the kernel ahead, which writes keys, runs.
    Lists of tiles are copied to the device in the first pass: no launch overlaps a copy."""
    query_starts: Sequence[int]
    """Row of the call's [T, ...] tensors where each sequence's queries begin."""
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    """Number of keys of each sequence, including the keys of its queries."""
    attend: Attend | None = None
    """What stands in for attention where a CUDA graph holds the other ops of a call alone."""
    num_rows: int = field(default=0, init=False, repr=False, compare=False)
    """The fewest rows of a call's tensors that hold the queries of all sequences."""
    most_queries: int = field(default=0, init=False, repr=False, compare=False)
    longest_context: int = field(default=0, init=False, repr=False, compare=False)
    mean_context: int = field(default=0, init=False, repr=False, compare=False)
    """Mean number of keys of a sequence, rounded up; 0 without sequences."""
    _kept: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not len(self.query_starts) == len(self.query_lens) == len(self.context_lens):
            raise ValueError(
                f"attention layout: {len(self.query_starts)} starts, {len(self.query_lens)} query "
                f"lengths and {len(self.context_lens)} context lengths; one of each per sequence."
            )
        lens = zip(self.query_lens, self.context_lens, strict=True)
        for i, (queries, context) in enumerate(lens):
            if not 0 <= queries <= context:
                raise ValueError(
                    f"attention layout: sequence {i} has {queries} queries and {context} keys; "
                    "0 <= queries <= keys."
                )
        # Every layer's call asks for these.
        ends = [s + n for s, n in zip(self.query_starts, self.query_lens, strict=True)]
        object.__setattr__(self, "num_rows", max(ends, default=0))
        object.__setattr__(self, "most_queries", max(self.query_lens, default=0))
        object.__setattr__(self, "longest_context", max(self.context_lens, default=0))
        mean = cdiv(sum(self.context_lens), max(len(self.context_lens), 1))
        object.__setattr__(self, "mean_context", mean)

    def kept(self, key: tuple[object, ...], make: Callable[[], _Kept]) -> _Kept:
        """What `make` returns, made at the first call with this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def owns(self, rows: int) -> bool:
        """Whether every row of the call is a query of some sequence."""
        return self._rows_from_first() >= rows

    @_once
    def _rows_from_first(self) -> int:
        """Number of rows before the first one that no sequence owns."""
        end = 0
        for start, queries in sorted(zip(self.query_starts, self.query_lens, strict=True)):
            if start > end:
                break
            end = max(end, start + queries)
        return end

    def key_rows(self, width: int) -> Tensor:
        """[sequences, width] storage row of each key position; past the end the last key's row."""
        raise NotImplementedError

    @_once
    def key_rows_on(self, device: torch.device) -> Tensor:
        """`key_rows` of the longest context, copied to a device once."""
        return from_host(self.key_rows(max(self.context_lens, default=1) or 1), device)

    @_once
    def plan(self, group: int, window: int | None) -> TilePlan:
        """The CPU's tile plan for `group` query heads per KV head."""
        starts, queries, contexts = map(
            _int64, (self.query_starts, self.query_lens, self.context_lens)
        )
        sequence, first_row, _ = _cut([n * group for n in self.query_lens], ROW_TILE)
        flat = first_row[:, None] + torch.arange(ROW_TILE)
        valid = flat < (queries * group)[sequence][:, None]
        token, head = flat // group, flat % group
        rows = ((starts[sequence][:, None] + token) * group + head).masked_fill(~valid, 0)
        positions = (contexts - queries)[sequence][:, None] + token
        # A tile's first row is never filler: its position is the tile's earliest.
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

    @_once
    def tables(self, device: torch.device) -> SequenceTables:
        """The layout's numbers on a device, copied once."""
        numbers = torch.tensor(
            [list(self.query_starts), list(self.query_lens), list(self.context_lens)],
            dtype=torch.int32,
        )
        starts, lens, contexts = from_host(numbers, device).unbind(0)
        table = from_host(self.block_table(), device)
        return SequenceTables(starts, lens, contexts, table, self.shared(device))

    def shared(self, device: torch.device) -> SharedTables | None:
        """Which sequences share keys, on a device; None where none do."""
        return None

    def block_table(self) -> Tensor:
        """[sequences, most blocks] int32 on the CPU; [1, 1] where keys are packed."""
        return torch.zeros(1, 1, dtype=torch.int32)

    @_once
    def num_tiles(self, group: int, rows_per_tile: int) -> int:
        """The number of `tiles`."""
        return sum(cdiv(n * group, rows_per_tile) for n in self.query_lens)

    @_once
    def tiles(self, device: torch.device, group: int, rows_per_tile: int) -> Tensor:
        """[tiles, 2] int32 on a device: a sequence and the tile's first row in it.

        A sequence's rows are its queries times the group's heads. Sequences come by `NEAR_KEYS` at
        a time, most keys first, and of these the longest tile. So tiles that run together share
        keys in the L2 cache, and the last are short.
        """
        sequence, first, _ = _cut([n * group for n in self.query_lens], rows_per_tile)
        contexts = _int64(self.context_lens)
        keys, order = contexts.sort(descending=True, stable=True)
        section = torch.empty_like(keys)
        section[order] = (keys.cumsum(0) - keys) // NEAR_KEYS
        length = (contexts - _int64(self.query_lens))[sequence] + first // group
        length -= section[sequence] * (self.longest_context + 1)  # later sections follow
        return _longest_first(length, device, sequence, first)

    @_once
    def tickets(self, device: torch.device, count: int) -> Tensor:
        """[count] int32 zeros on a device, for one stream; a launch that counts leaves them zero.

        RuntimeError if a captured call comes first: only the capture would set them to zero.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention: this layout is captured before its first call; run the call once, "
                "then capture it."
            )
        return torch.zeros(count, dtype=torch.int32, device=device)


@dataclass(frozen=True, kw_only=True)
class PackedSequences(AttentionLayout):
    """Whole sequences whose keys lie in the rows of their queries (training, scoring).

    ValueError if a sequence's numbers of keys and queries differ.
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

    @classmethod
    def interrupted(cls, attend: Attend) -> PackedSequences:
        """A training call whose attention is `attend`; the other ops ask nothing of the layout."""
        return cls(query_starts=(), query_lens=(), context_lens=(), attend=attend)

    @_once
    def key_tiles(self, device: torch.device, keys_per_tile: int) -> Tensor:
        """[tiles, 2] int32 on a device: a sequence and the tile's first key, most queries first."""
        sequence, first, _ = _cut(self.query_lens, keys_per_tile)
        # The queries from a key's position on see it.
        queries = _int64(self.query_lens)[sequence] - first
        return _longest_first(queries, device, sequence, first)

    @_once
    def query_tiles(self, device: torch.device, queries_per_tile: int) -> tuple[Tensor, Tensor]:
        """(sequence and first query of each tile [tiles, 2], number of each sequence's first tile
        [sequences]), both int32 on a device, in the order of the sequences."""
        sequence, first, before = _cut(self.query_lens, queries_per_tile)
        tiles = torch.stack([sequence, first], dim=1).flatten()
        # One tensor holds both, so that one copy is enough.
        both = from_host(torch.cat([tiles, before]).to(torch.int32), device)
        tiles, first_tiles = both.tensor_split([len(tiles)])
        return tiles.view(-1, 2), first_tiles

    def key_rows(self, width: int) -> Tensor:
        return _int64(self.query_starts)[:, None] + _clamped_positions(self.context_lens, width)


class Cache(TypedDict):
    """The fields of `PagedAttention` that say where keys and values lie."""

    slot_mapping: Tensor
    key_cache: Sequence[Tensor]
    value_cache: Sequence[Tensor]
    block_size: int


@dataclass(frozen=True, kw_only=True)
class PagedAttention(AttentionLayout):
    """New tokens of sequences whose keys and values lie in a paged cache (rollout)."""

    block_tables: Sequence[Sequence[int]]
    """Physical block ids of each sequence in logical order, covering its context."""
    slot_mapping: Tensor
    """[T] int64, the slot (block * block_size + offset) that each new token is written to."""
    key_cache: Sequence[Tensor]
    """Per layer [num_blocks, block_size, num_kv_heads, head_dim]."""
    value_cache: Sequence[Tensor]
    block_size: int
    shared_runs: Sequence[SharedRun] = ()
    """Sequences whose first keys lie in the same blocks, as far as a schedule should know."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tables = zip(self.block_tables, self.context_lens, strict=True)
        for i, (table, context) in enumerate(tables):
            if len(table) * self.block_size < context:
                raise ValueError(
                    f"paged attention: sequence {i} has {context} tokens but its {len(table)} "
                    f"blocks hold {len(table) * self.block_size}."
                )
        self._check_runs()

    def _check_runs(self) -> None:
        """ValueError unless every run says what is true of its sequences."""
        starts, lens, tables = self.query_starts, self.query_lens, self.block_tables
        seen: set[int] = set()
        for run in self.shared_runs:
            members = range(run.first, run.first + run.count)
            if not (2 <= run.count <= MOST_SHARERS and 0 <= run.first <= len(starts) - run.count):
                raise ValueError(
                    f"paged attention: {run} in a call of {len(starts)} sequences; a run has 2 to "
                    f"{MOST_SHARERS} of them."
                )
            if not seen.isdisjoint(members):
                raise ValueError(f"paged attention: a sequence of {run} is in another run too.")
            seen.update(members)
            past = min(self.context_lens[i] - lens[i] for i in members)
            if not 0 < run.keys <= past:
                raise ValueError(
                    f"paged attention: {run}, but one of its sequences has {past} keys before its "
                    "queries; all shared keys stand before them, and there is at least one."
                )
            blocks = cdiv(run.keys, self.block_size)
            if any(tables[i][:blocks] != tables[run.first][:blocks] for i in members):
                raise ValueError(
                    f"paged attention: {run}, but the first {blocks} blocks of its sequences are "
                    "not the same ones."
                )
        ends = (start + queries for start, queries in zip(starts, lens, strict=True))
        if self.shared_runs and any(end > start for end, start in zip(ends, starts[1:])):
            raise ValueError(
                "paged attention: where sequences share keys, the queries stand in their order."
            )

    @property
    def most_runs(self) -> int:
        """How many runs share keys, as far as a schedule should know; at most, where captured."""
        return len(self.shared_runs)

    def shared(self, device: torch.device) -> SharedTables | None:
        if not self.shared_runs:
            return None
        arrays = shared_arrays(self.shared_runs, len(self.shared_runs), len(self.query_lens))
        return SharedTables(
            *(from_host(torch.tensor(x, dtype=torch.int32), device) for x in arrays)
        )

    def most_shared_queries(self) -> int:
        """The most query rows from the first one of a run to its last."""
        starts, lens = self.query_starts, self.query_lens
        spans = [(run.first, run.first + run.count - 1) for run in self.shared_runs]
        return max(starts[last] + lens[last] - starts[first] for first, last in spans)

    @_once
    def by_past(self) -> tuple[PackedSequences | None, PagedAttention | None]:
        """(The sequences all of whose keys are new, those that continue a past); None for none."""
        spans = list(zip(self.query_starts, self.query_lens, self.context_lens, strict=True))
        whole = [i for i, (_, queries, keys) in enumerate(spans) if queries == keys]
        if not whole:
            return None, self
        packed = PackedSequences.of([spans[i][0] for i in whole], [spans[i][1] for i in whole])
        past = [i for i, (_, queries, keys) in enumerate(spans) if queries != keys]
        if not past:
            return packed, None
        starts, lens, contexts = zip(*(spans[i] for i in past), strict=True)
        tables = [self.block_tables[i] for i in past]
        own = {"query_starts": starts, "query_lens": lens, "context_lens": contexts}
        return packed, replace(self, **own, block_tables=tables, shared_runs=())

    def block_table(self) -> Tensor:
        longest = max((len(table) for table in self.block_tables), default=0)
        filled = [[*table, *([0] * (longest - len(table)))] for table in self.block_tables]
        return torch.tensor(filled, dtype=torch.int32).view(len(filled), longest)

    def key_rows(self, width: int) -> Tensor:
        tables = self.block_table().long()
        positions = _clamped_positions(self.context_lens, width)
        blocks = tables.gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size


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
        cls, numbers: SequenceTables, *, queries: int, capacity: int, **cache: Unpack[Cache]
    ) -> CapturedPagedAttention:
        """`queries` rows for each sequence of `numbers`, contexts of at most `capacity` keys."""
        sequences = numbers.query_len.shape[0]
        return cls(
            query_starts=range(0, sequences * queries, queries),
            query_lens=[min(queries, capacity)] * sequences,
            context_lens=[capacity] * sequences,
            block_tables=(),
            numbers=numbers,
            **cache,
        )

    @classmethod
    def interrupted(
        cls, attend: Attend, used: Tensor, **cache: Unpack[Cache]
    ) -> CapturedPagedAttention:
        """A call whose other ops are captured. Each replay brings its own layout for `attend`.

        To other ops the tokens are one sequence from row 0 on; `used` [1] int32 is the number of
        rows that are tokens.
        """
        table = torch.zeros(1, 1, dtype=torch.int32, device=used.device)
        return cls(
            query_starts=(),
            query_lens=(),
            context_lens=(),
            block_tables=(),
            attend=attend,
            numbers=SequenceTables(torch.zeros_like(used), used, used, table),
            **cache,
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
    def most_runs(self) -> int:
        return 0 if self.numbers.shared is None else len(self.numbers.shared.runs)

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
        numbers = self.numbers
        runs = [] if numbers.shared is None else numbers.shared.runs.tolist()
        return PagedAttention(
            query_starts=numbers.query_start.tolist(),
            query_lens=numbers.query_len.tolist(),
            context_lens=numbers.context_len.tolist(),
            block_tables=numbers.block_table.tolist(),
            shared_runs=[SharedRun(*run) for run in runs if run[2]],
            **{name: getattr(self, name) for name in Cache.__annotations__},
        )


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _cut(lens: Sequence[int], per_tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """int64 of the tiles of `lens` rows: sequence, first row in it; first tile of each sequence."""
    counts = -(-_int64(lens) // per_tile)
    before = counts.cumsum(0) - counts
    sequence = torch.repeat_interleave(counts)
    return sequence, (torch.arange(len(sequence)) - before[sequence]) * per_tile, before


def _longest_first(length: Tensor, device: torch.device, *columns: Tensor) -> Tensor:
    """[tiles, columns] int32 on a device, by `length` downward."""
    order = torch.argsort(length, descending=True, stable=True)
    return from_host(torch.stack(columns, dim=1)[order].to(torch.int32).contiguous(), device)


def _clamped_positions(context_lens: Sequence[int], width: int) -> Tensor:
    """[sequences, width] key positions, the last key's past the end of a sequence."""
    last = _int64(context_lens).sub(1).clamp(min=0)
    return torch.minimum(torch.arange(width)[None, :], last[:, None])
