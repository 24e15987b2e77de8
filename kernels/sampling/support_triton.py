"""The support of truncated rows, found on CUDA without a sort.

Shapes: logits [T, V] fp32, sampling parameters [T] -> support [2, T] int32.
Dtypes and rounding points: the quotient by the temperature and the difference from the maximum in
    fp32; ranks are integer keys, masses and their sums int64.
Order: that of `distribution`. Counts and masses are integers, which add up exactly in any order.
Errors: none; the caller checks.
Cost: one read of the logits of a row that truncates, one more where it has top_p without top_k.
    Then one program per row reads the blocks that reach the boundary some ten times.

A support is a prefix of the ranks: the key of its lowest logit and the last id with this key
describe it. Both are found by counting and weighing: a logit ranks by its integer key
(`vocabulary_triton.order_key`), equal keys by lower id first. `search` finds the largest key that
has a given weight at and above it; an entry weighs 1 for top-k and its mass for top-p. Each pass
cuts the interval of keys into nine, and reads only the blocks of 128 ids whose maximum reaches it.

One program works on a row, `entries`: (logits, divisor, maximum, maxima of blocks, list of blocks,
vocabulary).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.core.torch_op import kernel_op
from rl_consistency.kernels.reduction.tree_fold_triton import exp_fp32
from rl_consistency.kernels.sampling.vocabulary_triton import (
    BLOCK,
    VOCABULARY_BLOCK,
    launch_options,
    order_key,
    scaled_logits,
)

TOP_BLOCKS = 16  # blocks per program of `maxima_kernel`
SPLIT_BLOCKS = 32  # blocks per program of `masses_kernel`
SPLIT_TILE = 512  # ids that it handles at once
TILE = 2048  # ids that `support_kernel` handles at once
SPLITS = tl.constexpr(64)  # sums of splits that it reads at once
PIVOTS = 8  # keys that one pass compares with; it cuts an interval into PIVOTS + 1
EVERY_ID = tl.constexpr(2**31 - 1)
OUTSIDE = tl.constexpr(-(2**31))  # below the key of every logit
NAN_KEY = tl.constexpr(2**31 - 1)
# What `weigh` adds up.
MAXIMA = tl.constexpr(0)
ENTRIES = tl.constexpr(1)
MASSES = tl.constexpr(2)
MASS_UNIT = tl.constexpr(2.0**40)
# Adding and then subtracting it rounds an fp64 below 2**51 to an integer, halves to even.
TO_INTEGER = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def key_value(key):
    """The fp32 that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def integer_mass(s):
    """exp(s) in units of 2**-40, s <= 0; int64, 0 for NaN."""
    mass = exp_fp32(s)
    wide = tl.where(mass == mass, mass, 0.0).to(tl.float64) * MASS_UNIT
    return ((wide + TO_INTEGER) - TO_INTEGER).to(tl.int64)


@triton.jit
def listed_entries(
    entries, first, stop, UNIT: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr
):
    """Scaled logits, keys and ids [TILE] of blocks first .. stop, or list places if LISTED."""
    logits, divisor, _, _, listed, vocabulary = entries
    lane = tl.arange(0, TILE)
    place = first + lane // VOCABULARY_BLOCK
    block = tl.load(listed + place, mask=place < stop, other=0) if LISTED else place
    column = block * VOCABULARY_BLOCK + lane % VOCABULARY_BLOCK
    inside = (place < stop) & (column < vocabulary)
    z = tl.load(logits + column, mask=inside, other=-float("inf"))
    z = tl.reshape(scaled_logits(z[None, :], divisor, UNIT), (TILE,))
    return z, tl.where(inside, order_key(z), OUTSIDE), column


@triton.jit
def weigh(
    pivots, entries, begin, stop, WEIGHT: tl.constexpr, UNIT: tl.constexpr, LISTED: tl.constexpr,
    TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """[PIVOTS] int64: the weight at and above each pivot, over places [begin, stop)."""
    top, tops = entries[2], entries[3]
    limit = pivots.to(tl.int32)[:, None]
    weights = tl.zeros((PIVOTS, TILE), tl.int64)
    if WEIGHT == MAXIMA:
        for first in range(begin, stop, TILE):
            place = first + tl.arange(0, TILE)
            key = tl.load(tops + place, mask=place < stop, other=OUTSIDE)
            weights += (key[None, :] >= limit).to(tl.int64)
    else:
        for first in range(begin, stop, TILE // VOCABULARY_BLOCK):
            z, key, _ = listed_entries(entries, first, stop, UNIT, LISTED, TILE)
            above = key[None, :] >= limit
            if WEIGHT == MASSES:
                weights += tl.where(above, integer_mass(z - top)[None, :], 0)
            else:
                weights += above.to(tl.int64)
    return tl.sum(weights, axis=1)


@triton.jit
def search(
    target, low, high, reached, over, entries, stop, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """(key, reached, over): the largest key in [low, high) whose weight at and above is at least
    the target, that weight, and the weight above the key.

    The arguments `reached` and `over` are the weights at and above low and high. A count equal to
    the target ends the search early: its key already separates the entries to keep.
    """
    going = (high - low > 1) & (reached >= target)
    while going:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)
        weights = weigh(pivots, entries, 0, stop, WEIGHT, UNIT, True, TILE, PIVOTS)
        enough = weights >= target
        reached = tl.min(tl.where(enough, weights, reached))
        over = tl.max(tl.where(enough, over, weights))
        low += step * tl.sum(enough.to(tl.int64))
        high = tl.minimum(low + step, high)
        going = high - low > 1
        if WEIGHT != MASSES:
            going = going & (reached > target)
    return low, reached, over


@triton.jit
def row_maximum(tops, num_blocks, TILE: tl.constexpr):
    highest = tl.full((TILE,), OUTSIDE, tl.int32)
    for first in range(0, num_blocks, TILE):
        place = first + tl.arange(0, TILE)
        key = tl.load(tops + place, mask=place < num_blocks, other=OUTSIDE)
        highest = tl.maximum(highest, key)
    return tl.max(highest)


@triton.jit
def list_blocks(tops, listed, floor, num_blocks, TILE: tl.constexpr):
    """Write the blocks whose maximum reaches the floor, in order; return their number."""
    count = 0
    for first in range(0, num_blocks, TILE):
        place = first + tl.arange(0, TILE)
        key = tl.load(tops + place, mask=place < num_blocks, other=OUTSIDE)
        active = (place < num_blocks) & (key >= floor)
        rank = tl.cumsum(active.to(tl.int32))
        tl.store(listed + count + rank - 1, place, mask=active)
        count += tl.sum(active.to(tl.int32))
    # Threads read what other threads have listed.
    tl.debug_barrier()
    return count


@triton.jit
def tied_id(tie, key, entries, stop, UNIT: tl.constexpr, TILE: tl.constexpr):
    """The id of the tie-th entry that has the key, counted from 1."""
    found = 0
    seen = 0
    for first in range(0, stop, TILE // VOCABULARY_BLOCK):
        _, keys, column = listed_entries(entries, first, stop, UNIT, True, TILE)
        tied = (keys == key).to(tl.int32)
        rank = seen + tl.cumsum(tied)
        found += tl.sum(tl.where((tied == 1) & (rank == tie), column, 0))
        seen += tl.sum(tied)
    return found


@triton.jit
def truncation(temperature, top_k, top_p, min_p, row, vocabulary):
    """top_k, top_p and min_p of a row; 0, 1 and 0 keep all ids."""
    greedy = tl.load(temperature + row) == 0.0
    k = tl.where(greedy, 1, tl.load(top_k + row))
    p = tl.where(greedy, 1.0, tl.load(top_p + row))
    m = tl.where(greedy, 0.0, tl.load(min_p + row))
    return tl.where(k >= vocabulary, 0, k), p, m


@triton.jit
def row_divisor(temperature, row):
    t = tl.load(temperature + row + tl.arange(0, 1))
    return tl.where(t == 0.0, 1.0, t)


@triton.jit
def first_pivots(top, PIVOTS: tl.constexpr):
    """[PIVOTS] int64 keys, downward: i**2/2 below the maximum for i from 1, the last below all."""
    i = tl.arange(1, PIVOTS + 1).to(tl.float32)
    return tl.where(i == PIVOTS, OUTSIDE, order_key(top - i * i * 0.5).to(tl.int64))


@triton.jit
def lowest_within(log_min_p, highest, top):
    """The least int64 key whose value less the maximum is at least log(min_p)."""
    low = tl.full((), OUTSIDE, tl.int64)
    high = highest.to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        within = key_value(middle.to(tl.int32)) - top >= log_min_p
        high = tl.where(within, middle, high)
        low = tl.where(within, low, middle)
    return high


@triton.jit
def share(p, total):
    """ceil(p * total), at least 1: int64."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def maxima_kernel(
    logits, temperature, top_k, top_p, min_p, tops, vocabulary, num_blocks, row_stride,
    UNIT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Largest key of each block, tops [T, num_blocks] int32, in rows that truncate."""
    row = tl.program_id(0).to(tl.int64)
    k, p, m = truncation(temperature, top_k, top_p, min_p, row, vocabulary)
    if (k > 0) | (p < 1.0) | (m > 0.0):
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        column = block[:, None] * VOCABULARY_BLOCK + tl.arange(0, VOCABULARY_BLOCK)[None, :]
        inside = column < vocabulary
        z = tl.load(logits + row * row_stride + column, mask=inside, other=-float("inf"))
        key = order_key(scaled_logits(z, row_divisor(temperature, row), UNIT))
        key = tl.max(tl.where(inside, key, OUTSIDE), axis=1)
        tl.store(tops + row * num_blocks + block, key, mask=block < num_blocks)


@triton.jit
def masses_kernel(
    logits, temperature, top_k, top_p, min_p, tops, masses, vocabulary, num_blocks, row_stride,
    UNIT: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Mass at and above each first pivot in each split, [T, splits, PIVOTS] int64, for rows with
    top_p but no top_k."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    k, p, _ = truncation(temperature, top_k, top_p, min_p, row, vocabulary)
    if (k == 0) & (p < 1.0):
        highest = row_maximum(tops + row * num_blocks, num_blocks, TILE)
        top = key_value(highest)
        divisor = row_divisor(temperature, row)
        row_entries = (logits + row * row_stride, divisor, top, tops, tops, vocabulary)
        begin = split * BLOCKS
        stop = tl.minimum(begin + BLOCKS, num_blocks)
        pivots = first_pivots(top, PIVOTS)
        found = weigh(pivots, row_entries, begin, stop, MASSES, UNIT, False, TILE, PIVOTS)
        at = masses + (row * tl.num_programs(1) + split) * PIVOTS
        tl.store(at + tl.arange(0, PIVOTS), found)


@triton.jit(do_not_specialize=["num_rows"])
def support_kernel(
    logits, temperature, top_k, top_p, min_p, tops, masses, listed, support, num_rows, vocabulary,
    num_blocks, splits, row_stride, UNIT: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """support [2, num_rows] int32: each row's lowest key and the last id with this key."""
    row = tl.program_id(0).to(tl.int64)
    k, p, m = truncation(temperature, top_k, top_p, min_p, row, vocabulary)
    bound = tl.full((), OUTSIDE, tl.int64)
    last = tl.full((), EVERY_ID, tl.int32)
    if (k > 0) | (p < 1.0) | (m > 0.0):
        tops += row * num_blocks
        listed += row * num_blocks
        divisor = row_divisor(temperature, row)
        highest = row_maximum(tops, num_blocks, TILE)
        top = key_value(highest)
        row_entries = (logits + row * row_stride, divisor, top, tops, listed, vocabulary)
        # The key sought lies in [low, high); `search` narrows the interval.
        low = bound
        high = highest.to(tl.int64) + 1
        reached = tl.full((), 2**62, tl.int64)
        over = tl.full((), 0, tl.int64)
        total = reached
        target = over
        tie = over
        if highest == NAN_KEY:
            # NaN stays in the support, so that the row's normalizer is NaN.
            bound = tl.full((), NAN_KEY, tl.int64)
        else:
            if k == 1:
                low = high - 1
            elif (k > 0) & (k <= num_blocks):
                # The k-th largest block maximum: at least k entries reach it.
                low, _, _ = search(
                    k, low, high, reached, over, row_entries, num_blocks, MAXIMA, UNIT, TILE, PIVOTS
                )
            elif (k == 0) & (p < 1.0):
                weights = tl.zeros((PIVOTS,), tl.int64)
                for first in range(0, splits, SPLITS):
                    split = first + tl.arange(0, SPLITS)[:, None]
                    at = masses + (row * splits + split) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
                    weights += tl.sum(tl.load(at, mask=split < splits, other=0), axis=0)
                total = tl.max(weights)
                target = share(p, total)
                enough = weights >= target
                pivots = first_pivots(top, PIVOTS)
                low = tl.max(tl.where(enough, pivots, low))
                high = tl.min(tl.where(enough, high, pivots))
                reached = tl.min(tl.where(enough, weights, total))
                over = tl.max(tl.where(enough, over, weights))
            if (k > 0) | (p < 1.0):
                stop = list_blocks(tops, listed, low, num_blocks, TILE)
                if k > 0:
                    low, reached, over = search(
                        k, low, high, reached, over, row_entries, stop, ENTRIES, UNIT, TILE, PIVOTS
                    )
                    tie = tl.where(reached > k, k - over, 0)
                    if p < 1.0:
                        pivots = low + (tl.arange(0, PIVOTS) > 0)
                        weights = weigh(
                            pivots, row_entries, 0, stop, MASSES, UNIT, True, TILE, PIVOTS
                        )
                        mass = integer_mass(key_value(low.to(tl.int32)) - top)
                        total = tl.where(tie > 0, tl.min(weights) + tie * mass, tl.max(weights))
                        target = share(p, total)
                        reached = total
                        over = tl.full((), 0, tl.int64)
                if p < 1.0:
                    cut = low
                    low, reached, over = search(
                        target, low, high, reached, over, row_entries, stop, MASSES, UNIT, TILE,
                        PIVOTS,
                    )  # fmt: skip
                    mass = tl.maximum(integer_mass(key_value(low.to(tl.int32)) - top), 1)
                    needed = (target - over + mass - 1) // mass
                    spare = needed * mass < reached - over
                    tie = tl.where(spare | ((tie > 0) & (low == cut)), needed, 0)
                bound = low
                if tie > 0:
                    last = tied_id(tie, low.to(tl.int32), row_entries, stop, UNIT, TILE)
            if m > 0.0:
                least = lowest_within(tl.log(m.to(tl.float64)).to(tl.float32), highest, top)
                last = tl.where(least > bound, EVERY_ID, last)
                bound = tl.maximum(bound, least)
    tl.store(support + row, bound.to(tl.int32))
    tl.store(support + num_rows + row, last)


@kernel_op(fake=lambda logits, *_: logits.new_empty((2, logits.shape[0]), dtype=torch.int32))
def vocabulary_support(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    unit_temperature: bool,
) -> Tensor:
    """Supports of logits [T, V] fp32 with unit column stride, [2, T] int32, as `vocabulary_triton`
    reads them. The parameters are the fields of `SamplingRows`, contiguous."""
    num_rows, vocabulary = logits.shape
    device = logits.device
    support = torch.empty((2, num_rows), dtype=torch.int32, device=device)
    if num_rows == 0:
        return support
    num_blocks = cdiv(vocabulary, BLOCK)
    splits = cdiv(num_blocks, SPLIT_BLOCKS)
    tops, listed = torch.empty((2, num_rows, num_blocks), dtype=torch.int32, device=device)
    masses = torch.empty((num_rows, splits, PIVOTS), dtype=torch.int64, device=device)
    rows = (logits, temperature, top_k, top_p, min_p, tops)
    sizes = (vocabulary, num_blocks)
    stride = logits.stride(0)
    maxima_kernel[(num_rows, cdiv(num_blocks, TOP_BLOCKS))](
        *rows, *sizes, stride, **launch_options(UNIT=unit_temperature, BLOCKS=TOP_BLOCKS)
    )
    masses_kernel[(num_rows, splits)](
        *rows, masses, *sizes, stride,
        **launch_options(
            UNIT=unit_temperature, BLOCKS=SPLIT_BLOCKS, TILE=SPLIT_TILE, PIVOTS=PIVOTS
        ),
    )  # fmt: skip
    support_kernel[(num_rows,)](
        *rows, masses, listed, support, num_rows, *sizes, splits, stride,
        **launch_options(16, UNIT=unit_temperature, TILE=TILE, PIVOTS=PIVOTS),
    )  # fmt: skip
    return support
