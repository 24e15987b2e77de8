"""Ranks of a row's logits without a sort: device functions of `support_triton`.

A logit ranks by its integer key (`statistics_triton.order_key`), equal keys by lower id first.
`search` finds the largest key that has a given weight at and above it; an entry weighs 1 for top-k
and its mass for top-p, integers that add up exactly in any order. Each pass cuts the interval of
keys into nine, and reads only the blocks of 128 ids whose maximum reaches the interval.

One program works on a row, `entries`: (logits, divisor, maximum, maxima of blocks, list of blocks,
vocabulary).
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from rl_consistency.kernels.reduction.tree_fold_triton import exp_fp32
from rl_consistency.kernels.sampling.statistics_triton import (
    VOCABULARY_BLOCK,
    order_key,
    scaled_logits,
)

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
