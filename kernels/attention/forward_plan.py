"""How one forward call of attention runs: its schedule, and the programs its tiles are dealt to.

Every plan gives the same bits. Making one launches nothing and copies nothing to a device, and
`ForwardPlan.kernel` tells which plans share a compiled kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rl_consistency.kernels.attention.hopper.decode_cut import Cut, cut_for
from rl_consistency.kernels.attention.layout import AttentionLayout, PagedAttention
from rl_consistency.kernels.attention.schedules import (
    DECODE_CROWDED,
    DECODE_DEEP,
    DECODE_LAST,
    DECODE_POINTERS,
    DECODE_SPREAD,
    FP32_FORWARD,
    NO_RING,
    PREFILL_DESCRIPTORS,
    PREFILL_HOPPER,
    PREFILL_POINTERS,
    PREFILL_WIDE,
    PREFILL_WIDE_DESCRIPTORS,
    SPLIT_BYTES,
    SPLIT_ROWS,
    UNSPECIALIZED,
    Schedule,
    admits,
    holds_wide,
    hopper_columns,
    key_block,
    padded,
    reads_shared_keys_once,
    scanned,
)
from rl_consistency.kernels.core.device import has_tma, shared_memory, sm_count
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2

FEW_ROWS = 64
"""Up to this many rows of a sequence and KV head, a call takes a decode schedule."""
SPREAD_ROWS = 256
"""Written rows of a tile from which on several programs fold faster than one."""
NARROWEST = 8
"""Columns of the narrowest slice that a program folds: 32 bytes, as many as lanes."""
CROWDED_COLUMNS = 80
"""Columns of a head up to which a multiprocessor holds three programs of decode."""


@dataclass(frozen=True)
class ForwardPlan:
    """How a call runs; no field changes a bit."""

    schedule: Schedule
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

    @property
    def divided(self) -> int:
        """Tiles of a ring that several programs share."""
        return 0 if self.cut is None else self.tiles - self.cut.whole

    @property
    def kernel(self) -> Hashable:
        """What tells compiled kernels apart. For the same operands and window, plans with equal
        ones launch the same kernels, on layouts that are not captured and share no keys."""
        if self.cut is not None:
            dealt = self.cut.whole > 0, self.divided > 0, self.slices
            return self.schedule, self.stored, dealt
        if self.programs > 1:
            return self.schedule, self.stored, scanned(self.most_blocks)
        return self.schedule, None, None


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, window: int | None = None, *,
    schedule: Schedule | None = None, programs_per_tile: int | None = None, cut: Cut | None = None,
) -> ForwardPlan:  # fmt: skip
    """The plan of a call with at least one query. A schedule, number of programs or cut that is
    given replaces the rules' choice.

    ValueError where operands, layout or device do not admit what is given, or have no schedule.
    """
    device, head_dim, kv_heads = q.device, q.shape[2], k.shape[1]
    group = q.shape[1] // kv_heads
    most_rows = layout.most_queries * group
    if schedule is None:
        schedule = pick_forward(q, k, v, layout, most_rows, window)
    elif not admits(schedule, layout, q, k, v):
        raise ValueError(NO_RING if schedule.ring else UNSPECIALIZED)
    if cut is not None and not schedule.ring:
        raise ValueError(NO_RING)
    if cut is not None and programs_per_tile is not None:
        raise ValueError("attention: a cut says how many programs a tile has; give no number too.")
    tiles = layout.num_tiles(group, schedule.rows) * kv_heads
    stored = next_power_of_2(min(most_rows, schedule.rows))
    most_blocks = cdiv(layout.longest_context, key_block(head_dim))
    plan = partial(ForwardPlan, schedule, tiles, stored, most_blocks)
    if schedule.specialized:
        return plan()
    multiprocessors, dim = sm_count(device), padded(head_dim)
    places = schedule.resident * multiprocessors
    if not schedule.ring:
        programs = programs_per_tile
        if programs is None:
            programs = programs_for(tiles, most_blocks, most_rows, dim, places)
        return plan(programs=programs)
    if programs_per_tile is not None:
        cut = Cut.even(tiles, programs_per_tile)
    elif cut is None:
        once = reads_once(k, layout, window)
        cut = decode_cut(
            layout, tiles, most_rows, head_dim, multiprocessors, window, read_once=once
        )
    cut.check(tiles)
    slices = slices_for(cut, tiles, dim, places) if schedule.spread else 1
    return plan(cut=cut, slices=slices)


def reads_once(k: Tensor, layout: AttentionLayout, window: int | None) -> bool:
    """Whether a ring leaves keys that sequences share to another kernel."""
    shared = isinstance(layout, PagedAttention) and layout.shares_keys
    return shared and window is None and reads_shared_keys_once(k)


def pick_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, most_rows: int,
    window: int | None = None,
) -> Schedule:  # fmt: skip
    """The forward schedule; `most_rows` is the largest number of rows of a sequence and KV head."""
    few = most_rows <= FEW_ROWS
    if q.dtype == torch.float32:
        return _fitting(q, FP32_FORWARD)
    if few and admits(DECODE_LAST, layout, q, k, v):
        return _pick_ring(q, k, layout, most_rows, window)
    if few:
        return DECODE_POINTERS if q.shape[2] <= 128 else _fitting(q, FP32_FORWARD)
    if admits(PREFILL_HOPPER, layout, q, k, v):
        return PREFILL_HOPPER
    if q.shape[2] > 128:
        return PREFILL_WIDE_DESCRIPTORS if holds_wide(q.device) else _fitting(q, PREFILL_WIDE)
    return PREFILL_DESCRIPTORS if has_tma(q.device) else PREFILL_POINTERS


def _pick_ring(
    q: Tensor, k: Tensor, layout: AttentionLayout, most_rows: int, window: int | None
) -> Schedule:
    """The ring for the host's lengths, which bound a captured launch."""
    multiprocessors, dim = sm_count(q.device), q.shape[2]
    tiles = len(layout.query_lens) * cdiv(most_rows, SPLIT_ROWS) * k.shape[1]
    blocks = seen_blocks(layout.longest_context, layout, dim, window)
    once = reads_once(k, layout, window)
    cut = decode_cut(layout, tiles, most_rows, dim, multiprocessors, window, read_once=once)
    if cut.whole < tiles:
        places = DECODE_SPREAD.resident * multiprocessors
        if cut.programs > places and hopper_columns(dim) <= CROWDED_COLUMNS:
            return DECODE_CROWDED
        sliced = slices_for(cut, tiles, dim, places) > 1
        return DECODE_SPREAD if sliced and blocks * most_rows >= SPREAD_ROWS else DECODE_LAST
    # 80 and 128 tiles of 4 to 96 blocks on an H100: 1 to 10 % faster than the ring of 3 with heads
    # of 64, 1 to 6 % with 96. Heads of 128 are 1 to 8 % slower with it.
    return DECODE_DEEP if tiles <= multiprocessors and dim < 128 else DECODE_LAST


def _fitting(q: Tensor, schedule: Schedule) -> Schedule:
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

    With `read_once` another kernel reads some keys of sequences that share them, and the host does
    not know how many blocks are left.
    """
    dim = padded(head_dim)
    most_blocks = seen_blocks(layout.longest_context, layout, head_dim, window)
    plain = programs_for(tiles, most_blocks, most_rows, dim, multiprocessors)
    if most_rows > SPLIT_ROWS or read_once:
        return Cut.even(tiles, plain)
    written = 4 * next_power_of_2(most_rows) * (dim + 9)
    cut = cut_for(
        tiles,
        seen_blocks(layout.mean_context, layout, head_dim, window),
        written,
        multiprocessors=multiprocessors,
        resident=(
            DECODE_CROWDED if hopper_columns(head_dim) <= CROWDED_COLUMNS else DECODE_SPREAD
        ).resident,
        plain=plain,
        exact=layout.exact,
    )
    # There is room for all blocks of a context, also where a window leaves some out.
    room = (tiles - cut.whole) * cdiv(layout.longest_context, key_block(head_dim)) * written
    fits = room <= SPLIT_BYTES
    return cut if fits else Cut.even(tiles, plain)


def slices_for(cut: Cut, tiles: int, dim: int, places: int) -> int:
    """Programs of a tile that fold a slice of its `dim` columns each: a power of two.

    1 where a tile is whole, or where the launch exceeds the device's `places`: folding programs
    wait for all the others, which must run at the same time.
    """
    if cut.whole or cut.programs > places:
        return 1
    most = max(1, min(cut.programs // tiles, dim // NARROWEST))
    return 1 << (most.bit_length() - 1)
