"""The schedules of attention on CUDA, and the rules that pick one for a call.

Every schedule gives the same bytes, so a rule may look at any size. Tests and `verify` compare all
entries of the tables. An entry that no rule picks is there for the comparison in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences, PagedAttention
from rl_consistency.kernels.core.device import has_tma, has_wgmma, shared_memory
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2

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


def hopper_columns(head_dim: int) -> int:
    """D as the kernels with specialised warps hold it: heads of 65 to 96 take 80 or 96."""
    if 64 < head_dim <= 96:
        return 80 if head_dim <= 80 else 96
    return padded(head_dim)


def reach(window: int | None) -> int:
    """A call's window as the kernels take it."""
    return NO_WINDOW if window is None else min(window, NO_WINDOW)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp that is kept for the backward pass.

    In fp32 models its rounding would be the largest error of the gradients: they keep it in fp64.
    """
    return torch.float64 if dtype == torch.float32 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Schedule:
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
    `hopper/wide/backward.py`."""
    ring: int = 0
    """Shared buffers through which `hopper/decode.py` copies paged keys and values (sm_90)."""
    spread: bool = False
    """Whether several programs fold a tile whose blocks programs of a ring have written, a slice of
    the columns each. The whole launch must fit the device at once; else the last program folds."""
    resident: int = 2
    """Programs per multiprocessor for which a launch leaves registers and shared memory, where the
    key blocks of a tile are spread over programs."""


PREFILL_HOPPER = Schedule(rows=128, warps=12, stages=2, descriptors=True, specialized=True)
PREFILL_DESCRIPTORS = Schedule(rows=128, warps=8, stages=3, descriptors=True)
PREFILL_POINTERS = Schedule(rows=64, warps=4, stages=2)
PREFILL_WIDE_DESCRIPTORS = Schedule(rows=64, warps=8, stages=3, descriptors=True)
PREFILL_WIDE = Schedule(rows=64, warps=4, stages=1)
FP32_FORWARD = Schedule(rows=16, warps=8, stages=1)
FP32_CANDIDATE = Schedule(rows=16, warps=4, stages=1)
PREFILL = (
    *(PREFILL_HOPPER, PREFILL_DESCRIPTORS, PREFILL_POINTERS),
    *(PREFILL_WIDE_DESCRIPTORS, PREFILL_WIDE, FP32_CANDIDATE, FP32_FORWARD),
)

DECODE_SPREAD = Schedule(rows=16, warps=4, stages=1, ring=3, spread=True, resident=2)
DECODE_LAST = Schedule(rows=16, warps=4, stages=1, ring=3, resident=1)
DECODE_DEEP = Schedule(rows=16, warps=4, stages=1, ring=4, resident=1)
DECODE_CROWDED = Schedule(rows=16, warps=4, stages=1, ring=3, resident=3)
DECODE_POINTERS = Schedule(rows=16, warps=4, stages=4)
DECODE = (
    *(DECODE_SPREAD, DECODE_LAST, DECODE_DEEP, DECODE_CROWDED),
    *(DECODE_POINTERS, FP32_CANDIDATE, FP32_FORWARD),
)
"""Rings for long tiles that programs share, for other tiles, for narrow heads with at most one tile
per multiprocessor, and for heads up to 80 where programs share tiles and fill the device more than
twice; then the schedules of calls that no ring admits."""

SHARED_LOW = Schedule(rows=16, warps=4, stages=1, ring=3)
SHARED_HIGH = Schedule(rows=32, warps=4, stages=1, ring=3)
SHARED_DEEP = Schedule(rows=32, warps=4, stages=1, ring=5, resident=1)
SHARED = (SHARED_LOW, SHARED_HIGH, SHARED_DEEP)
"""Tiles of the rows of sequences that share keys, through a ring of an odd number of buffers;
programs share the blocks of the low ones only."""

BACKWARD_POINTERS = Schedule(rows=64, keys=64, warps=4, stages=2)
BACKWARD_WIDE = Schedule(rows=32, keys=32, warps=8, stages=1)
BACKWARD_WIDE_DESCRIPTORS = Schedule(rows=64, keys=64, warps=8, stages=2, descriptors=True)
QUERIES_DESCRIPTORS = Schedule(rows=128, keys=64, warps=8, stages=3, descriptors=True)
BACKWARD_QUERIES = (
    QUERIES_DESCRIPTORS,
    BACKWARD_WIDE_DESCRIPTORS,
    BACKWARD_POINTERS,
    Schedule(rows=64, keys=32, warps=8, stages=1),
    BACKWARD_WIDE,
)
"""dq by tiles of queries; the wide entry is for fp32 too."""
FIVE_PRODUCTS = Schedule(rows=64, keys=128, warps=12, stages=2, descriptors=True, specialized=True)
SEVEN_PRODUCTS = Schedule(rows=64, keys=64, warps=12, stages=2, descriptors=True, specialized=True)
KEYS_DESCRIPTORS = Schedule(rows=64, keys=64, warps=4, stages=2, descriptors=True)
BACKWARD_KEYS = (
    FIVE_PRODUCTS,
    SEVEN_PRODUCTS,
    KEYS_DESCRIPTORS,
    BACKWARD_WIDE_DESCRIPTORS,
    BACKWARD_POINTERS,
    Schedule(rows=32, keys=64, warps=8, stages=1),
    BACKWARD_WIDE,
)
"""dk and dv by tiles of keys; `FIVE_PRODUCTS` (heads up to 128) and `SEVEN_PRODUCTS` (above)
compute dq as well."""
SPECIALIZED = (FIVE_PRODUCTS, SEVEN_PRODUCTS)


def holds_wide(device: torch.device) -> bool:
    """Whether tiles of heads above 128 fit a program twice over: server GPUs from sm_90 on."""
    return has_tma(device) and shared_memory(device) >= WIDE_BYTES


def pick_shared(
    rows: int, *, runs: int, likely: int, kv_heads: int, most_blocks: int, dim: int, places: int
) -> tuple[Schedule, int]:
    """(schedule, programs that share a tile's blocks) for runs of up to `rows` rows of a KV head.

    A launch has room for `runs`, of which `likely` are there. Where low tiles of these leave half
    of the places empty, programs share their blocks, if those fit `SPLIT_BYTES`. Else the lowest
    tile that holds a run, or the highest: the tiles of a run are neighbours, and its keys come from
    memory once. High tiles that have a multiprocessor each get the deep ring (1.5B, 32 groups of 8
    on an H200: 49 us, and 60 with the other).
    """
    tiles = cdiv(rows, SHARED_LOW.rows) * kv_heads
    written = runs * tiles * most_blocks * SHARED_LOW.rows * (dim + 11) * 4
    programs = min(most_blocks, places // (likely * tiles))
    if programs > 1 and written <= SPLIT_BYTES:
        return SHARED_LOW, programs
    if rows <= SHARED_LOW.rows:
        return SHARED_LOW, 1
    high_tiles = likely * cdiv(rows, SHARED_HIGH.rows) * kv_heads
    return SHARED_DEEP if high_tiles <= places else SHARED_HIGH, 1


def pick_backward(described: Schedule, q: Tensor) -> Schedule:
    """The schedule of a backward kernel; `described` is its entry for sm_90."""
    if q.shape[2] > 128 and q.dtype != torch.float32 and holds_wide(q.device):
        return BACKWARD_WIDE_DESCRIPTORS
    if q.dtype == torch.float32 or q.shape[2] > 128:
        return BACKWARD_WIDE
    return described if has_tma(q.device) else BACKWARD_POINTERS


def pick_specialized(layout: AttentionLayout, *operands: Tensor) -> Schedule | None:
    """The specialised schedule of all gradients, if one can run; `operands` are do, q, k and v."""
    heads, head_dim = operands[1].shape[1:]
    if admits(SEVEN_PRODUCTS, layout, *operands):
        return SEVEN_PRODUCTS
    if not isinstance(layout, PackedSequences) or not admits(FIVE_PRODUCTS, layout, *operands):
        return None
    fits = chain_bytes(layout, heads, hopper_columns(head_dim)) <= CHAIN_BYTES
    return FIVE_PRODUCTS if fits else None


def chain_bytes(layout: PackedSequences, heads: int, dim: int) -> int:
    """Bytes of the fp32 sums of dq [heads, dim] that `FIVE_PRODUCTS` keeps in memory, whole tiles.

    0 where every sequence fits one tile of keys.
    """
    if layout.most_queries <= FIVE_PRODUCTS.keys:
        return 0
    tiles = sum(cdiv(n, FIVE_PRODUCTS.rows) for n in layout.query_lens)
    return 4 * tiles * FIVE_PRODUCTS.rows * heads * dim


def forward_entries(table: tuple[Schedule, ...], dtype: torch.dtype) -> list[Schedule]:
    """A forward table's schedules for a dtype: low tiles for fp32, whose products would spill
    registers otherwise."""
    return [s for s in table if dtype != torch.float32 or (s.rows == SPLIT_ROWS and not s.ring)]


def backward_entries(table: tuple[Schedule, ...], dtype: torch.dtype) -> list[Schedule]:
    """A backward table's schedules for a dtype: fp32 pins the step over what is summed, keys for dq
    and queries for dk and dv."""
    summed = attrgetter("keys" if table is BACKWARD_QUERIES else "rows")
    return [s for s in table if dtype != torch.float32 or summed(s) == FP32_SUMMED]


def admits(schedule: Schedule, layout: AttentionLayout, *operands: Tensor) -> bool:
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
