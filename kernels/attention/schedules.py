"""The schedules of attention on CUDA, and every rule that picks one for a call.

All schedules give the same bytes, so a rule may look at any size. Tests and `verify` compare all
entries of the tables. An entry that no rule picks is there for the comparison in fp32.

`plan_forward` plans one forward call: its schedule, and the programs that its tiles are dealt to.
It launches nothing and copies nothing to a device, and `ForwardPlan.kernel` tells which plans share
a compiled kernel. So a rollout finds the kernels to compile ahead by planning thousands of calls
that may come. `pick_shared`, `pick_specialized` and `pick_backward` choose for the other kernels.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import (
    MOST_SHARERS,
    AttentionLayout,
    PackedSequences,
    PagedAttention,
)
from rl_consistency.kernels.core.device import has_tma, has_wgmma, shared_memory, sm_count
from rl_consistency.kernels.core.launch import cdiv, next_power_of_2

LOG2E = 1.4426950408889634
NO_WINDOW = 1 << 30
"""The window of a call without one: longer than any sequence; a position plus it fits an int32."""
UNSPECIALIZED = (
    "attention: specialised warps need sm_90, packed bf16 or fp16 operands on 16 bytes, rows 32 "
    "bytes apart and a head_dim of 48 to 256, in the backward pass to 128 for five products and "
    "from 129 for seven; leave the schedule out to have one chosen."
)
NO_RING = (
    "attention: a ring of buffers needs sm_90, a paged cache, bf16 or fp16, a head_dim of at least "
    "48 and rows 32 bytes apart; leave the schedule out to have one chosen."
)
SPLIT_ROWS = 16
"""Up to this many rows, the key blocks of a tile may be spread over programs."""
SPLIT_BYTES = 256 << 20
"""The most memory for spread key blocks; tiles that need more are not split."""
CHAIN_BYTES = 2 << 30
"""The most memory for the sums of dq; where they need more, two kernels do the backward pass."""
WIDE_BYTES = 225 << 10
"""Shared memory of the largest tiles of heads above 128."""
FP32_SUMMED = 32
"""Keys of one fp32 step of dq, and queries of one of dk and dv; part of the order."""
FEW_ROWS = 64
"""Up to this many rows of a sequence and KV head, a call takes a decode schedule."""
SPREAD_ROWS = 256
"""Written rows of a tile from which on several programs fold faster than one."""
NARROWEST = 8
"""Columns of the narrowest slice that a program folds: 32 bytes, as many as lanes."""
FEWEST_BLOCKS = 4
"""Tiles of fewer blocks stay whole."""
FILLED = 0.95
"""The part of the multiprocessors that has to have a program, else tiles are divided further."""
LONG_SHARE = 8
"""Blocks of a program from which all tiles shared by two rounds of programs are faster."""
FOLD_BYTES = 256 << 10
"""The most written bytes of a tile that one program should fold: some 10 us."""
PER_CALL = (
    "tickets", "runs", "tiles", "num_tiles", "first_tiles", "programs", "query_start", "query_len",
    "context_len", "tables", "num_blocks", "slots", "window", "whole", "divided",
)  # fmt: skip
"""Kernel arguments that differ from call to call: Triton compiles one kernel for all values."""


def key_block(head_dim: int) -> int:
    """Keys in one step of the softmax fold on CUDA; part of the order."""
    return 128 if head_dim <= 128 else 64


def padded(head_dim: int) -> int:
    """D as the kernels hold it: a power of two of at least 16, with zeros past D."""
    return max(next_power_of_2(head_dim), 16)


def scanned(most_blocks: int) -> int:
    """Key blocks over which a tile's maxima are scanned, where programs without a ring share it."""
    return max(16, next_power_of_2(most_blocks))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp that is kept for the backward pass.

    In fp32 models its rounding would be the largest error of the gradients: they keep it in fp64.
    """
    return torch.float64 if dtype == torch.float32 else torch.float32


@dataclass(frozen=True, kw_only=True)
class AttentionSchedule:
    """How a pass is cut into programs; no field changes a bit.

    The kernel fixes `warps` and `stages` where warps are specialised or there is a ring.
    """

    rows: int  # of a program's tile
    keys: int = 0  # of a backward tile; the forward pass takes the order's key block
    warps: int
    stages: int  # tiles in flight
    descriptors: bool = False
    """Whether packed keys are read through tensor descriptors (sm_90)."""
    specialized: bool = False
    """Whether warps are specialised (sm_90): `hopper/forward.py`, `hopper/backward.py` and
    `hopper/wide_backward.py`."""
    ring: int = 0
    """Shared buffers through which `hopper/decode.py` copies paged keys and values (sm_90)."""
    spread: bool = False
    """Whether several programs fold a tile whose blocks programs of a ring have written, a slice of
    the columns each. The whole launch must fit the device at once; else the last program folds."""
    resident: int = 2
    """Programs per multiprocessor for which a launch leaves registers and shared memory, where the
    key blocks of a tile are spread over programs."""


PREFILL_HOPPER = AttentionSchedule(rows=128, warps=12, stages=2, descriptors=True, specialized=True)
PREFILL_DESCRIPTORS = AttentionSchedule(rows=128, warps=8, stages=3, descriptors=True)
PREFILL_POINTERS = AttentionSchedule(rows=64, warps=4, stages=2)
PREFILL_WIDE_DESCRIPTORS = AttentionSchedule(rows=64, warps=8, stages=3, descriptors=True)
PREFILL_WIDE = AttentionSchedule(rows=64, warps=4, stages=1)
FP32_FORWARD = AttentionSchedule(rows=16, warps=8, stages=1)
FP32_CANDIDATE = AttentionSchedule(rows=16, warps=4, stages=1)
PREFILL = (
    *(PREFILL_HOPPER, PREFILL_DESCRIPTORS, PREFILL_POINTERS),
    *(PREFILL_WIDE_DESCRIPTORS, PREFILL_WIDE, FP32_CANDIDATE, FP32_FORWARD),
)

DECODE_SPREAD = AttentionSchedule(rows=16, warps=4, stages=1, ring=3, spread=True, resident=2)
DECODE_LAST = AttentionSchedule(rows=16, warps=4, stages=1, ring=3, resident=1)
DECODE_DEEP = AttentionSchedule(rows=16, warps=4, stages=1, ring=4, resident=1)
DECODE_CROWDED = AttentionSchedule(rows=16, warps=4, stages=1, ring=3, resident=3)
DECODE_POINTERS = AttentionSchedule(rows=16, warps=4, stages=4)
DECODE = (
    *(DECODE_SPREAD, DECODE_LAST, DECODE_DEEP, DECODE_CROWDED),
    *(DECODE_POINTERS, FP32_CANDIDATE, FP32_FORWARD),
)
"""Rings, one a line:
SPREAD: long tiles that programs share.
LAST: other tiles.
DEEP: heads below 128 with at most one tile per multiprocessor.
CROWDED: heads up to 64 where programs share tiles and fill the device more than twice.
Then the schedules of calls that no ring admits."""

SHARED_LOW = AttentionSchedule(rows=16, warps=4, stages=1, ring=3)
SHARED_HIGH = AttentionSchedule(rows=32, warps=4, stages=1, ring=3)
SHARED_DEEP = AttentionSchedule(rows=32, warps=4, stages=1, ring=5, resident=1)
SHARED = (SHARED_LOW, SHARED_HIGH, SHARED_DEEP)
"""Tiles of the rows of sequences that share keys, through a ring of an odd number of buffers;
programs share the blocks of the low ones only."""

BACKWARD_POINTERS = AttentionSchedule(rows=64, keys=64, warps=4, stages=2)
BACKWARD_WIDE = AttentionSchedule(rows=32, keys=32, warps=8, stages=1)
BACKWARD_WIDE_DESCRIPTORS = AttentionSchedule(rows=64, keys=64, warps=8, stages=2, descriptors=True)
QUERIES_DESCRIPTORS = AttentionSchedule(rows=128, keys=64, warps=8, stages=3, descriptors=True)
BACKWARD_QUERIES = (
    QUERIES_DESCRIPTORS,
    BACKWARD_WIDE_DESCRIPTORS,
    BACKWARD_POINTERS,
    AttentionSchedule(rows=64, keys=32, warps=8, stages=1),
    BACKWARD_WIDE,
)
"""dq by tiles of queries; the wide entry is for fp32 too."""
FIVE_PRODUCTS = AttentionSchedule(
    rows=64, keys=128, warps=12, stages=2, descriptors=True, specialized=True
)
SEVEN_PRODUCTS = AttentionSchedule(
    rows=64, keys=64, warps=12, stages=2, descriptors=True, specialized=True
)
KEYS_DESCRIPTORS = AttentionSchedule(rows=64, keys=64, warps=4, stages=2, descriptors=True)
BACKWARD_KEYS = (
    FIVE_PRODUCTS,
    SEVEN_PRODUCTS,
    KEYS_DESCRIPTORS,
    BACKWARD_WIDE_DESCRIPTORS,
    BACKWARD_POINTERS,
    AttentionSchedule(rows=32, keys=64, warps=8, stages=1),
    BACKWARD_WIDE,
)
"""dk and dv by tiles of keys; `FIVE_PRODUCTS` (heads up to 128) and `SEVEN_PRODUCTS` (above)
compute dq as well."""
SPECIALIZED = (FIVE_PRODUCTS, SEVEN_PRODUCTS)


def forward_entries(
    table: tuple[AttentionSchedule, ...], dtype: torch.dtype
) -> list[AttentionSchedule]:
    """A forward table's schedules for a dtype: low tiles for fp32, whose products would spill
    registers otherwise."""
    return [s for s in table if dtype != torch.float32 or (s.rows == SPLIT_ROWS and not s.ring)]


def backward_entries(
    table: tuple[AttentionSchedule, ...], dtype: torch.dtype
) -> list[AttentionSchedule]:
    """A backward table's schedules for a dtype: fp32 pins the step over what is summed, keys for dq
    and queries for dk and dv."""
    summed = attrgetter("keys" if table is BACKWARD_QUERIES else "rows")
    return [s for s in table if dtype != torch.float32 or summed(s) == FP32_SUMMED]


def admits(schedule: AttentionSchedule, layout: AttentionLayout, *operands: Tensor) -> bool:
    """Whether a schedule can run a call; the launch finds out whether it fits the device."""
    if not schedule.specialized and not schedule.ring:
        return True
    kind = PackedSequences if schedule.specialized else PagedAttention
    # Where rows are copied without descriptors, Triton sees multiples of 16 elements as aligned.
    line, dims = {
        FIVE_PRODUCTS: (16, (64, 128)),
        SEVEN_PRODUCTS: (32, (256,)),
    }.get(schedule, (32, (64, 128, 256)))
    if not isinstance(layout, kind) or not has_wgmma(operands[0].device):
        return False
    for x in operands:
        if x.itemsize != 2 or padded(x.shape[2]) not in dims or not _on_lines(x, line):
            return False
    return True


def reads_shared_keys_once(k: Tensor) -> bool:
    """Whether decode reads the keys that sequences share once, for a cache [..., Hkv, D]."""
    return has_wgmma(k.device) and k.itemsize == 2 and k.shape[-1] in (64, 128)


def describable(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can address [T, heads, D] tensors: sm_90, 16-byte aligned rows."""
    return all(has_tma(x.device) and _on_lines(x, 16) for x in tensors)


def _on_lines(x: Tensor, line: int) -> bool:
    """Whether [T, heads, D] starts on 16 bytes and its rows lie multiples of `line` bytes apart."""
    token, head, element = x.stride()
    if element != 1 or x.data_ptr() % 16:
        return False
    size = x.itemsize
    return token * size % line == 0 and head * size % line == 0


def holds_wide(device: torch.device) -> bool:
    """Whether tiles of heads above 128 fit a program twice over: server GPUs from sm_90 on."""
    return has_tma(device) and shared_memory(device) >= WIDE_BYTES


@dataclass(frozen=True)
class Cut:
    """The programs of a launch.

    The first `whole` tiles, counted once per KV head, have one program each, which folds in
    registers. The other tiles are divided: the rest of the programs are dealt to them in turn, they
    write every block to memory, and a tile's last one folds. Example: Cut(0, 264) gives the first
    40 of 56 tiles 5 programs each and the others 4.
    """

    whole: int
    programs: int
    """Programs of the launch; at least one for each tile."""

    @classmethod
    def even(cls, tiles: int, programs: int) -> Cut:
        """A cut with `programs` for every tile."""
        return cls(tiles, tiles) if programs == 1 else cls(0, tiles * programs)

    def check(self, tiles: int) -> None:
        """ValueError unless every tile has a program, and a whole one only one."""
        if not 0 <= self.whole <= tiles <= self.programs:
            raise ValueError(f"attention: {self} for {tiles} tiles; each needs a program.")
        if self.whole == tiles < self.programs:
            raise ValueError(f"attention: {self} has more programs than its {tiles} whole tiles.")


@dataclass(frozen=True)
class SharedPlan:
    """How the keys that sequences share are read once; no field changes a bit."""

    schedule: AttentionSchedule
    tiles: int
    """Tiles of a run's rows of one KV head, at most."""
    programs: int
    """Programs that share the key blocks of a tile."""


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """How a call runs; no field but `keys` changes a bit."""

    schedule: AttentionSchedule
    columns: int
    """Columns of a head as the kernels hold it."""
    keys: int
    """Keys in one step of the fold; part of the order."""
    tiles: int
    """Tiles of all sequences, counted once per KV head."""
    stored: int
    """Rows that a tile writes where programs share its key blocks."""
    most_blocks: int
    """Steps of the longest tile's fold."""
    cut: Cut | None = None
    """How the tiles of a ring are dealt to programs."""
    slices: int = 1
    """Programs of a ring's tile that fold a slice of its columns each."""
    programs: int = 1
    """Programs that share a tile's key blocks, without a ring."""
    shared: SharedPlan | None = None
    """How a ring leaves keys that sequences share to another kernel; None: it reads all keys."""

    @property
    def kernel(self) -> Hashable:
        """What tells compiled kernels apart. For the same operands and window, plans with equal
        ones launch the same kernels, on layouts that are not captured and share no keys."""
        if self.cut is not None:
            dealt = self.cut.whole > 0, self.tiles > self.cut.whole, self.slices
            return self.schedule, self.stored, dealt
        if self.programs > 1:
            return self.schedule, self.stored, scanned(self.most_blocks)
        return self.schedule, None, None


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, window: int | None = None, *,
    schedule: AttentionSchedule | None = None, programs_per_tile: int | None = None,
    cut: Cut | None = None, shared_schedule: AttentionSchedule | None = None,
) -> ForwardPlan:  # fmt: skip
    """The plan of a call with at least one query. What is given replaces the rules' choice: a
    schedule, the programs that share the key blocks of a tile of few rows, or the whole cut of a
    ring's tiles, and the schedule of keys that sequences share.

    ValueError where operands, layout or device do not admit what is given, or have no schedule.
    """
    head_dim, kv_heads = q.shape[2], k.shape[1]
    group = q.shape[1] // kv_heads
    most_rows = layout.most_queries * group
    found = schedule or _pick_forward(q, k, v, layout, most_rows)
    if schedule is not None and not admits(schedule, layout, q, k, v):
        raise ValueError(NO_RING if schedule.ring else UNSPECIALIZED)
    if cut is not None and not found.ring:
        raise ValueError(NO_RING)
    if cut is not None and programs_per_tile is not None:
        raise ValueError("attention: a cut says how many programs a tile has; give no number too.")
    keys, dim = key_block(head_dim), padded(head_dim)
    tiles = layout.num_tiles(group, found.rows) * kv_heads
    most_blocks = cdiv(layout.longest_context, keys)
    plan = partial(
        ForwardPlan,
        columns=dim,
        keys=keys,
        tiles=tiles,
        stored=next_power_of_2(min(most_rows, found.rows)),
        most_blocks=most_blocks,
    )
    if found.specialized:
        return plan(schedule=found)
    places = sm_count(q.device)
    if not found.ring:
        if (programs := programs_per_tile) is None:
            resident = found.resident * places
            programs = programs_for(tiles, most_blocks, most_rows, dim, resident)
        return plan(schedule=found, programs=programs)
    once = reads_once(k, layout, window)
    if programs_per_tile is not None:
        cut = Cut.even(tiles, programs_per_tile)
    elif cut is None:
        cut = decode_cut(layout, tiles, most_rows, head_dim, places, window, read_once=once)
    cut.check(tiles)
    if schedule is None:
        blocks = seen_blocks(layout.longest_context, layout, head_dim, window)
        found = _pick_ring(cut, tiles, blocks * most_rows, head_dim, places)
    slices = slices_for(cut, tiles, dim, found.resident * places) if found.spread else 1
    shared = None
    if once:
        assert isinstance(layout, PagedAttention)
        shared = pick_shared(
            layout.most_shared_queries() * group, runs=layout.most_runs,
            likely=cdiv(len(layout.query_lens), MOST_SHARERS), kv_heads=kv_heads,
            most_blocks=most_blocks, dim=dim, places=places, schedule=shared_schedule,
            programs=programs_per_tile,
        )  # fmt: skip
    return plan(schedule=found, cut=cut, slices=slices, shared=shared)


def _pick_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, most_rows: int
) -> AttentionSchedule:
    """The forward schedule, `DECODE_LAST` for any ring. `most_rows` is the largest number of rows
    of a sequence and KV head."""
    few = most_rows <= FEW_ROWS
    if q.dtype == torch.float32:
        return _fitting(q, FP32_FORWARD)
    if few and admits(DECODE_LAST, layout, q, k, v):
        return DECODE_LAST
    if few:
        return DECODE_POINTERS if q.shape[2] <= 128 else _fitting(q, FP32_FORWARD)
    if admits(PREFILL_HOPPER, layout, q, k, v):
        return PREFILL_HOPPER
    if q.shape[2] > 128:
        return PREFILL_WIDE_DESCRIPTORS if holds_wide(q.device) else _fitting(q, PREFILL_WIDE)
    return PREFILL_DESCRIPTORS if has_tma(q.device) else PREFILL_POINTERS


def _pick_ring(
    cut: Cut, tiles: int, most_written: int, head_dim: int, multiprocessors: int
) -> AttentionSchedule:
    """The ring for the host's lengths, which bound a captured launch. `most_written` is the most
    rows that a tile's blocks write."""
    if cut.whole < tiles:
        places = DECODE_SPREAD.resident * multiprocessors
        if cut.programs > places and holds_three(head_dim):
            return DECODE_CROWDED
        sliced = slices_for(cut, tiles, padded(head_dim), places) > 1
        return DECODE_SPREAD if sliced and most_written >= SPREAD_ROWS else DECODE_LAST
    # 80 and 128 tiles of 4 to 96 blocks on an H100: 1 to 10 % faster than the ring of 3 with heads
    # of 64, 1 to 6 % with 96. Heads of 128 are 1 to 8 % slower with it.
    return DECODE_DEEP if tiles <= multiprocessors and head_dim < 128 else DECODE_LAST


def holds_three(head_dim: int) -> bool:
    """Whether a multiprocessor holds three programs of decode: 48 tiles of 24 blocks with heads of
    64 take 20.5 us in place of 26.3, 920 of 64 blocks 680 in place of 708 (H100)."""
    return padded(head_dim) <= 64


def _fitting(q: Tensor, schedule: AttentionSchedule) -> AttentionSchedule:
    """The schedule of fp32 or of heads above 128; ValueError if the device's shared memory is too
    small for its key blocks."""
    columns = padded(q.shape[2])
    needed = q.dtype.itemsize * columns * (schedule.rows + 2 * key_block(q.shape[2]))
    limit = shared_memory(q.device)
    if limit < needed:
        raise ValueError(
            f"attention: {q.dtype} with head_dim {q.shape[2]} needs {needed >> 10} KB of shared "
            f"memory for a block of keys and {q.device} has {limit >> 10} KB. Use a 16-bit dtype, "
            "a smaller head_dim, or a GPU of compute capability 8.0 or 9.0."
        )
    return schedule


def programs_for(grid: int, most_blocks: int, most_rows: int, dim: int, places: int) -> int:
    """Programs that share each tile's key blocks: enough to fill the device's `places`.

    1 where the tiles alone fill it, or where written blocks would take more than `SPLIT_BYTES`.
    """
    if most_rows > SPLIT_ROWS or most_blocks < 4:
        return 1
    written = grid * most_blocks * next_power_of_2(most_rows)
    if written * (dim + 11) * 4 > SPLIT_BYTES:
        return 1
    return max(1, min(most_blocks, places // grid))


def seen_blocks(context: int, layout: AttentionLayout, head_dim: int, window: int | None) -> int:
    """The most key blocks of a context that a tile of few rows walks over."""
    keys = key_block(head_dim)
    if window is not None:
        # From the border of the first block that the first query sees to the last query.
        context = min(context, window + layout.most_queries + keys - 2)
    return cdiv(context, keys)


def decode_cut(
    layout: AttentionLayout, tiles: int, most_rows: int, head_dim: int, multiprocessors: int,
    window: int | None = None, *, read_once: bool,
) -> Cut:  # fmt: skip
    """How a ring's tiles, counted once per KV head, are dealt to programs.

    Where the layout has only bounds of the lengths, no tile is divided that the even cut leaves
    whole, but those of a round that would be hardly begun. With `read_once` another kernel reads
    some keys of sequences that share them, and the host does not know how many blocks are left.
    """
    dim = padded(head_dim)
    most_blocks = seen_blocks(layout.longest_context, layout, head_dim, window)
    blocks = seen_blocks(layout.mean_context, layout, head_dim, window)
    plain = programs_for(tiles, most_blocks, most_rows, dim, multiprocessors)
    even = Cut.even(tiles, plain)
    filled = FILLED * multiprocessors <= even.programs <= multiprocessors
    if most_rows > SPLIT_ROWS or read_once or filled or blocks < FEWEST_BLOCKS:
        return even
    written = 4 * next_power_of_2(most_rows) * (dim + 9)
    ring = DECODE_CROWDED if holds_three(head_dim) else DECODE_SPREAD
    places = multiprocessors * ring.resident
    whole = tiles // places * places
    rest = tiles - whole
    long = tiles * blocks >= 2 * places * LONG_SHARE and blocks * written <= FOLD_BYTES
    cut = even
    if whole:
        if 0 < 2 * rest <= places:
            cut = Cut(whole, whole + min(places, rest * blocks))
    elif layout.exact and long:
        cut = Cut(0, 2 * places)
    elif plain > 1:
        cut = Cut(0, max(even.programs, min(places, tiles * blocks)))
    # There is room for all blocks of a context, also where a window leaves some out.
    room = (tiles - cut.whole) * cdiv(layout.longest_context, key_block(head_dim)) * written
    return cut if room <= SPLIT_BYTES else even


def slices_for(cut: Cut, tiles: int, dim: int, places: int) -> int:
    """Programs of a tile that fold a slice of its `dim` columns each: a power of two.

    1 where a tile is whole, or where the launch exceeds the device's `places`: folding programs
    wait for all the others, which must run at the same time.
    """
    if cut.whole or cut.programs > places:
        return 1
    most = max(1, min(cut.programs // tiles, dim // NARROWEST))
    return 1 << (most.bit_length() - 1)


def reads_once(k: Tensor, layout: AttentionLayout, window: int | None) -> bool:
    """Whether a ring leaves keys that sequences share to another kernel."""
    shared = isinstance(layout, PagedAttention) and layout.most_runs > 0
    return shared and window is None and reads_shared_keys_once(k)


def pick_shared(
    rows: int, *, runs: int, likely: int, kv_heads: int, most_blocks: int, dim: int, places: int,
    schedule: AttentionSchedule | None = None, programs: int | None = None,
) -> SharedPlan:  # fmt: skip
    """How the keys of runs of up to `rows` rows of a KV head are read; a schedule or number of
    programs that is given replaces the rules' choice.

    A launch has room for `runs`, of which `likely` are there. Where low tiles of these leave half
    of the places empty, programs share their blocks, if those fit `SPLIT_BYTES`. Else the lowest
    tile that holds a run, or the highest: the tiles of a run are neighbours, and its keys come from
    memory once. High tiles that have a multiprocessor each get the deep ring (1.5B, 32 groups of 8
    on an H200: 49 us, and 60 with the other).
    """
    tiles = cdiv(rows, SHARED_LOW.rows) * kv_heads
    written = runs * tiles * most_blocks * SHARED_LOW.rows * (dim + 11) * 4
    likely_programs = min(most_blocks, places // (likely * tiles))
    shares = likely_programs > 1 and written <= SPLIT_BYTES
    if schedule is None:
        high_tiles = likely * cdiv(rows, SHARED_HIGH.rows) * kv_heads
        high = SHARED_DEEP if high_tiles <= places else SHARED_HIGH
        schedule = SHARED_LOW if shares or rows <= SHARED_LOW.rows else high
    if schedule.rows > SPLIT_ROWS:
        programs = 1  # only low tiles are split
    elif programs is None:
        programs = likely_programs if shares else 1
    return SharedPlan(schedule, cdiv(rows, schedule.rows), programs)


def pick_backward(described: AttentionSchedule, q: Tensor) -> AttentionSchedule:
    """The schedule of a backward kernel; `described` is its entry for sm_90."""
    if q.shape[2] > 128 and q.dtype != torch.float32 and holds_wide(q.device):
        return BACKWARD_WIDE_DESCRIPTORS
    if q.dtype == torch.float32 or q.shape[2] > 128:
        return BACKWARD_WIDE
    return described if has_tma(q.device) else BACKWARD_POINTERS


def pick_specialized(layout: AttentionLayout, *operands: Tensor) -> AttentionSchedule | None:
    """The specialised schedule of all gradients, if one can run; `operands` are do, q, k and v."""
    heads, head_dim = operands[1].shape[1:]
    if admits(SEVEN_PRODUCTS, layout, *operands):
        return SEVEN_PRODUCTS
    if not isinstance(layout, PackedSequences) or not admits(FIVE_PRODUCTS, layout, *operands):
        return None
    fits = chain_bytes(layout, heads, padded(head_dim)) <= CHAIN_BYTES
    return FIVE_PRODUCTS if fits else None


def chain_bytes(layout: PackedSequences, heads: int, dim: int) -> int:
    """Bytes of the fp32 sums of dq [heads, dim] that `FIVE_PRODUCTS` keeps in memory, whole tiles.

    0 where every sequence fits one tile of keys.
    """
    if layout.most_queries <= FIVE_PRODUCTS.keys:
        return 0
    tiles = sum(cdiv(n, FIVE_PRODUCTS.rows) for n in layout.query_lens)
    return 4 * tiles * FIVE_PRODUCTS.rows * heads * dim
